// The panel that says everything about one reduction, or one layer of experts.

function drawDetails(data, entry, tokens, alike, close) {
  const panel = byId('details');
  panel.classList.toggle('open', entry !== null);
  if (entry === null) {
    panel.replaceChildren(make('h2', {}, 'Details'), make('p', {}, 'Nothing is chosen.'));
    return;
  }
  const site = 'op' in entry;
  panel.replaceChildren(
    make('div', {class: 'details-head'},
      make('h2', {class: 'path'}, entry.module),
      make('button', {type: 'button', class: 'plain', onclick: close, 'aria-label': 'Close the details'}, '×')),
    make('p', {class: 'status-line'},
      make('span', {class: `badge ${entry.status}`}, `${MARKS[entry.status]} ${entry.status}`),
      alike > 1 ? ` and ${number(alike - 1)} more like it` : ''),
    ...(site ? siteDetails(data, entry, tokens) : expertsDetails(entry)).filter((part) => part !== null),
  );
  panel.scrollTop = 0;
}

function siteDetails(data, site, tokens) {
  const time = timeOf(data, site, tokens);
  const facts = [
    ['became', site.op],
    ['merged into', site.merged_into],
    ['norm', site.norm],
    ['reduced value', [site.shape, site.dtype].filter(Boolean).join(' ')],
    ['served by', site.backends.length ? ranges(site) : null],
    [`at ${count(tokens, 'token')}`, time && `${time.unfused.toFixed(1)} → ${time.fused.toFixed(1)} µs (${time.label})`],
  ];
  return [list(facts), reasons(site), pictures(data, site)];
}

function expertsDetails(entry) {
  const facts = [
    ['experts', entry.sizes],
    ['config', entry.config],
    ['files read', entry.files.length ? entry.files.join(', ') : null],
    ['notes', entry.notes.length ? entry.notes.join(' ') : null],
  ];
  return [list(facts), reasons(entry)];
}

function list(facts) {
  return make('dl', {class: 'facts'}, facts.filter(([, value]) => value).flatMap(([name, value]) => [
    make('dt', {}, name), make('dd', {}, value),
  ]));
}

/** The size ranges: which backend serves messages up to which size. */
function ranges(site) {
  return make('ul', {class: 'ranges'}, site.backends.map((range) => {
    const name = [range.backend, range.variant].filter(Boolean).join(' ');
    if (range.max_bytes === null) return make('li', {}, site.backends.length > 1 ? `${name}, any larger size` : `${name}, any size`);
    const tokens = site.row_bytes ? ` (${count(Math.floor(range.max_bytes / site.row_bytes), 'token')})` : '';
    return make('li', {}, `${name} up to ${number(range.max_bytes / 1024)} KiB${tokens}`);
  }));
}

/** Why it was left alone, and what would change that. Reasons of rules that it is no case for come last, and small. */
function reasons(entry) {
  if (!entry.reasons.length) return null;
  const main = entry.reasons.filter((reason) => reason.main);
  const other = entry.reasons.filter((reason) => !reason.main);
  return make('section', {class: 'reasons'},
    make('h3', {}, 'Why it was left alone'),
    main.map((reason) => make('div', {class: 'reason'},
      make('p', {}, reason.text),
      make('p', {class: 'advice'}, make('strong', {}, 'What would change it: '), reason.advice))),
    other.length ? make('ul', {class: 'small'}, other.map((reason) => make('li', {}, `${reason.rule}: ${reason.text}`))) : null);
}

function pictures(data, site) {
  const picture = site.picture === null ? null : data.pictures[site.picture];
  if (!picture || !picture.before) return null;
  const one = (title, graph) => make('figure', {}, make('figcaption', {}, title), drawPicture(graph, title));
  return make('div', {class: 'pictures'},
    one(picture.after ? 'Before' : 'In the graph', picture.before), picture.after ? one('After', picture.after) : null);
}
