// Puts the page together: state, filters, and what happens when the reader does something.

const data = JSON.parse(byId('data').textContent);
data.sites.forEach((site) => { site.key = site.id; });
data.experts.forEach((entry, index) => { entry.key = index; });

const sideBySide = window.matchMedia('(min-width: 60.01rem)');
const state = {
  tokens: 64,
  unfolded: new Set(),
  chosen: null,
  previewed: null,
  filters: {status: new Set(['fused', 'merged', 'declined']), kind: '', reason: ''},
};

const actions = {
  choose(entry, alike, button) {
    state.chosen = state.chosen?.entry === entry ? null : {entry, alike};
    state.previewed = null;
    for (const other of document.querySelectorAll('.chip')) other.setAttribute('aria-pressed', 'false');
    if (state.chosen) button?.setAttribute('aria-pressed', 'true');
    showDetails();
    if (state.chosen && !sideBySide.matches) button?.scrollIntoView({block: 'start'});
  },
  preview(entry, alike) {
    if (!sideBySide.matches) return; // a sheet that comes up under the pointer would take the tap
    state.previewed = entry && {entry, alike};
    showDetails();
  },
  toggle(fold) {
    if (!state.unfolded.delete(fold)) state.unfolded.add(fold);
    draw();
    document.querySelector(`[data-key="fold-${fold}"]`)?.focus();
  },
};

function showDetails() {
  const current = state.previewed ?? state.chosen;
  drawDetails(data, current?.entry ?? null, state.tokens, current?.alike ?? 0, () => {
    const key = state.chosen && `${'op' in state.chosen.entry ? 'site' : 'experts'}-${state.chosen.entry.key}`;
    state.chosen = null;
    draw();
    if (key) document.querySelector(`[data-key="${key}"]`)?.focus({preventScroll: true});
    state.previewed = null;
    showDetails();
  });
}

function draw() {
  const shown = drawColumn(data, state, actions);
  byId('shown').textContent = `${count(shown, 'reduction')} of ${number(data.sites.length)} shown`;
  const folds = data.folds.map((fold, index) => (fold.repeats > 1 ? index : -1)).filter((index) => index >= 0);
  const button = byId('fold-all');
  button.hidden = !folds.length;
  const open = state.unfolded.size > 0;
  button.textContent = open ? 'Fold all' : 'Unfold all';
  button.onclick = () => {
    state.unfolded = new Set(open ? [] : folds);
    draw();
  };
  showDetails();
}

function drawFilters() {
  const totals = {fused: data.totals.fused, merged: data.totals.merged, declined: data.totals.declined};
  const boxes = Object.entries(totals).map(([status, total]) => make('label', {class: `pill ${status}`},
    make('input', {
      type: 'checkbox', name: 'status', value: status, checked: true,
      onchange: (event) => {
        if (event.target.checked) state.filters.status.add(status);
        else state.filters.status.delete(status);
        draw();
      },
    }), ` ${MARKS[status]} ${status} (${number(total)})`));
  const all = [...data.sites, ...data.experts];
  const kinds = [...new Set(all.map((entry) => entry.kind))];
  const reasons = [...new Set(all.flatMap((entry) => entry.reasons.filter((r) => r.main).map((r) => r.general)))];
  byId('filters').append(
    make('fieldset', {}, make('legend', {}, 'Status'), boxes),
    choice('kind', 'Part of a layer', 'all parts', kinds),
    choice('reason', 'Reason', 'any', reasons),
  );
  byId('filters').addEventListener('submit', (event) => event.preventDefault());
}

function choice(name, label, everything, values) {
  return make('div', {class: 'choice'}, make('label', {for: `filter-${name}`}, label),
    make('select', {
      id: `filter-${name}`, disabled: !values.length,
      onchange: (event) => { state.filters[name] = event.target.value; draw(); },
    }, make('option', {value: ''}, everything), values.map((value) => make('option', {value}, value))));
}

function drawTotals() {
  const {all_reduce: all, fused, merged, declined} = data.totals;
  const entries = [['all-reduces', all, ''], ['fused', fused, 'fused'], ['merged', merged, 'merged'], ['declined', declined, 'declined']];
  if (data.experts.length) {
    const lowered = data.experts.filter((entry) => entry.status === 'lowered').length;
    entries.push(['expert layers on Triton kernels', `${number(lowered)} of ${number(data.experts.length)}`, 'lowered']);
  }
  byId('totals').append(...entries.map(([name, value, status]) => make('div', {class: `total ${status}`},
    make('dt', {}, status ? `${MARKS[status]} ${name}` : name),
    make('dd', {'data-total': name}, typeof value === 'number' ? number(value) : value))));
  byId('host').textContent = data.traced ? data.host : data.headline;
}

function drawAbout() {
  const seconds = Object.entries(data.seconds).map(([name, value]) => `${name} ${value} s`).join(', ');
  const facts = [...data.gate, ...data.notes];
  if (data.placements.proved !== undefined) {
    facts.push(`Placements: proved ${count(data.placements.proved, 'value')}, ${number(data.placements.unknown)} unknown.`);
  }
  facts.push(`${count(data.graphs, 'graph')}${seconds ? `; ${seconds}` : ''}.`);
  byId('about').append(make('ul', {}, facts.map((fact) => make('li', {}, fact))));
  if (!data.rules.length) return;
  byId('about').append(make('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Rules'}, make('table', {},
    make('thead', {}, make('tr', {}, ['rule', 'matched', 'declined', 'seconds'].map((name) => make('th', {scope: 'col'}, name)))),
    make('tbody', {}, data.rules.map((rule) => make('tr', {}, make('th', {scope: 'row'}, rule.name),
      make('td', {}, number(rule.matches)), make('td', {}, number(rule.declines)), make('td', {}, rule.seconds.toFixed(3))))))));
}

drawTotals();
drawFilters();
drawSavings(data, (tokens) => { state.tokens = tokens; showDetails(); });
drawAbout();
draw();
byId('layers').addEventListener('keydown', moveWithArrows);
document.addEventListener('keydown', (event) => {
  if (event.key !== 'Escape') return;
  state.previewed = null;
  if (state.chosen) actions.choose(state.chosen.entry, 0);
  else showDetails();
});
