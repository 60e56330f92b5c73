// Microseconds a step, fused and not, from the measured table, at the token count of the slider.

const MAX_POSITION = 14 * 4; // quarters of a power of two: 1 … 16,384 tokens

const tokensAt = (position) => Math.round(2 ** (position / 4));

/** The candidate that serves a message, as the table's ranges say: "symm_mem/one_shot". */
function servedBy(times, tokens) {
  const bytes = tokens * times.row_bytes;
  return times.ranges.find((range) => range.max_bytes === null || bytes <= range.max_bytes).label;
}

/** Microseconds of a candidate, between the two measured token counts around; null where it was not measured. */
function microseconds(times, label, tokens) {
  const rows = times.rows.filter((row) => label in row.us);
  if (!rows.length) return null;
  const above = rows.find((row) => row.tokens >= tokens) ?? rows[rows.length - 1];
  const below = rows.filter((row) => row.tokens <= tokens).pop() ?? rows[0];
  if (above.tokens === below.tokens) return above.us[label];
  const share = (tokens - below.tokens) / (above.tokens - below.tokens);
  return below.us[label] + share * (above.us[label] - below.us[label]);
}

/** What one site takes: {unfused, fused, label}, or null where nothing was measured for it. */
function timeOf(data, site, tokens) {
  if (site.status !== 'fused' || site.times === null) return null;
  const times = data.times[site.times];
  const label = servedBy(times, tokens);
  const unfused = microseconds(times, 'unfused', tokens);
  const fused = microseconds(times, label, tokens);
  return unfused === null || fused === null ? null : {unfused, fused, label};
}

/** A step's sum over all fused sites, and how many of them it holds. */
function totalTime(data, tokens) {
  const each = data.sites.map((site) => timeOf(data, site, tokens)).filter((time) => time !== null);
  const sum = (key) => each.reduce((total, time) => total + time[key], 0);
  return {sites: each.length, unfused: sum('unfused'), fused: sum('fused')};
}

/** The slider and what follows from it; `changed(tokens)` is called when it moves. */
function drawSavings(data, changed) {
  const place = byId('savings');
  if (data.why_no_times !== null) {
    place.append(make('p', {}, data.why_no_times));
    return;
  }
  const output = make('output', {for: 'tokens', id: 'tokens-shown'});
  const slider = make('input', {
    type: 'range', id: 'tokens', min: 0, max: MAX_POSITION, step: 1, value: 6 * 4, oninput: () => update(),
  });
  const sentence = make('p', {id: 'saved', role: 'status'});
  const bars = ['unfused', 'fused'].map((name) => {
    const bar = make('span', {class: `bar ${name}`});
    const text = make('span', {class: 'bar-text'});
    return {name, bar, text, row: make('div', {class: 'bar-row'}, make('span', {class: 'bar-name'}, name), bar, text)};
  });
  place.append(
    make('div', {class: 'slider'}, make('label', {for: 'tokens'}, 'Tokens in a step'), slider, output),
    sentence,
    make('div', {class: 'bars', 'aria-hidden': 'true'}, bars.map((entry) => entry.row)),
    make('p', {class: 'small'}, sources(data)),
  );

  function update() {
    const tokens = tokensAt(Number(slider.value));
    const total = totalTime(data, tokens);
    const saved = total.unfused - total.fused;
    output.textContent = number(tokens);
    slider.setAttribute('aria-valuetext', count(tokens, 'token'));
    sentence.replaceChildren(
      make('strong', {}, `${number(saved / tokens, saved / tokens < 10 ? 2 : 0)} µs a token`),
      ` saved, expected: ${count(total.sites, 'fused reduction')} take ${number(total.fused)} µs a step instead of ` +
        `${number(total.unfused)} µs.`,
    );
    for (const {name, bar, text} of bars) {
      bar.style.width = `${(60 * total[name]) / Math.max(total.unfused, total.fused, 1e-9)}%`;
      text.textContent = `${number(total[name])} µs`;
    }
    changed(tokens);
  }
  update();
}

/** Where the figures come from. */
function sources(data) {
  return data.times.map((times) => {
    const widths = times.from_widths.map((width) => number(width));
    const measured = times.from_widths.includes(times.hidden)
      ? `at hidden size ${widths[0]}`
      : `at hidden ${widths.length > 1 ? 'sizes' : 'size'} ${widths.join(' and ')}, the nearest to ${number(times.hidden)}`;
    return `Reduction, residual add and norm, measured on ${times.measured_on} ${measured} (${times.date}, ${times.table}); ` +
      'straight lines between measured token counts. Reductions that were merged away save more, which is not counted. ';
  });
}
