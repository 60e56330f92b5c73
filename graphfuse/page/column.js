// The model as a column of layers. Folds hold layers that are alike; one of them stands for all.

/** Whether a filter lets an entry (a reduction, or a layer of experts) through. */
function passes(entry, filters) {
  const statusOk = filters.status.has(entry.status === 'lowered' ? 'fused' : entry.status);
  const kindOk = !filters.kind || entry.kind === filters.kind;
  return statusOk && kindOk && (!filters.reason || entry.reasons.some((reason) => reason.main && reason.general === filters.reason));
}

/** The rows to draw: {layers: [index], repeats, fold, open}. An unfolded fold is a row a layer. */
function rowsToDraw(data, unfolded) {
  return data.folds.flatMap((fold, number) => {
    const block = [...Array(fold.period).keys()].map((offset) => fold.start + offset);
    if (fold.repeats === 1) return [{layers: block, repeats: 1, fold: null}];
    if (!unfolded.has(number)) return [{layers: block, repeats: fold.repeats, fold: number, open: false}];
    const all = [...Array(fold.period * fold.repeats).keys()].map((offset) => fold.start + offset);
    return all.map((layer, index) => ({layers: [layer], repeats: 1, fold: index === 0 ? number : null, open: true}));
  });
}

/** Draws the column, and returns how many reductions it stands for. `actions`: choose, preview, toggle. */
function drawColumn(data, state, actions) {
  let shown = 0;
  const rows = rowsToDraw(data, state.unfolded).map((row) => {
    const lines = row.layers.map((layer) => drawLayer(data, layer, row, state, actions)).filter((line) => line !== null);
    if (!lines.length) return null;
    for (const line of lines) shown += line.sites * row.repeats;
    return make('li', {class: row.repeats > 1 ? 'fold' : null},
      row.fold === null ? null : foldHead(data, row, actions),
      make('div', {class: 'lines'}, lines.map((line) => line.element)));
  });
  byId('layers').replaceChildren(...rows.filter((row) => row !== null));
  return shown;
}

function foldHead(data, row, actions) {
  const fold = data.folds[row.fold];
  const last = data.layers[fold.start + fold.period * fold.repeats - 1].name;
  const text = fold.period === 1 ? `${number(fold.repeats)} alike` : `${number(fold.repeats)} × ${number(fold.period)} alike`;
  return make('div', {class: 'fold-head'},
    make('span', {class: 'fold-name'}, `${data.layers[fold.start].name} – ${last}`),
    make('span', {class: 'fold-count'}, text),
    make('button', {
      type: 'button', class: 'plain', 'aria-expanded': String(row.open), 'data-key': `fold-${row.fold}`,
      'aria-label': `${row.open ? 'Fold' : 'Unfold'} ${data.layers[fold.start].name} to ${last}`,
      onclick: () => actions.toggle(row.fold),
    }, row.open ? 'Fold' : 'Unfold'));
}

/** One layer's chain, or null if the filters leave nothing of it. */
function drawLayer(data, index, row, state, actions) {
  const layer = data.layers[index];
  const chips = [];
  let sites = 0;
  let entries = 0;
  for (const item of layer.items) {
    if ('part' in item) {
      if (item.part !== layer.name) chips.push(make('li', {}, make('span', {class: 'part'}, item.part)));
      continue;
    }
    const site = 'site' in item;
    const entry = site ? data.sites[item.site] : data.experts[item.experts];
    if (!passes(entry, state.filters)) continue;
    entries += 1;
    sites += site ? 1 : 0;
    chips.push(make('li', {}, chip(site ? siteText(entry) : expertsText(entry), entry, row, state, actions)));
  }
  if (!entries) return null;
  const name = row.repeats > 1 && row.layers.length === 1 ? null : make('span', {class: 'layer-name'}, layer.name);
  return {sites, element: make('div', {class: 'layer'}, name, make('ul', {class: 'chain'}, chips))};
}

const siteText = (site) => site.chain.join(' → ');
const expertsText = (entry) => (entry.count === null ? 'experts' : `${number(entry.count)} experts, top ${entry.top_k}`);

function chip(text, entry, row, state, actions) {
  const key = ('op' in entry ? 'site-' : 'experts-') + entry.key;
  return make('button', {
    type: 'button',
    class: `chip ${entry.status}`,
    'data-key': key,
    'data-status': entry.status,
    'data-count': row.repeats,
    'aria-pressed': String(state.chosen?.entry === entry),
    'aria-label': `${entry.status}: ${text}, ${entry.module}`,
    onclick: (event) => actions.choose(entry, row.repeats, event.currentTarget),
    onfocus: () => actions.preview(entry, row.repeats),
    onmouseenter: () => actions.preview(entry, row.repeats),
    onmouseleave: () => actions.preview(null, 0),
  }, make('span', {class: 'mark', 'aria-hidden': 'true'}, MARKS[entry.status]), ` ${text}`);
}

/** Arrow keys go from chip to chip; Home and End to the first and last. */
function moveWithArrows(event) {
  const chips = [...document.querySelectorAll('.chip')];
  const at = chips.indexOf(document.activeElement);
  if (at < 0) return;
  const step = {ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1}[event.key];
  const target = step ? chips[at + step] : {Home: chips[0], End: chips[chips.length - 1]}[event.key];
  if (!target) return;
  event.preventDefault();
  target.focus();
}
