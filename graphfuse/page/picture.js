// A small graph of ops as SVG, drawn from top to bottom.

const BOX = {width: 96, height: 44, gap: 8, row: 70};

/** The row of each box: one below everything it reads; what reads nothing stands just above its first reader. */
function rowsOf(graph) {
  const rows = graph.boxes.map(() => 0);
  for (let pass = 0; pass < graph.boxes.length; pass += 1) {
    for (const [from, to] of graph.edges) rows[to] = Math.max(rows[to], rows[from] + 1);
  }
  graph.boxes.forEach((_, index) => {
    const readers = graph.edges.filter(([from]) => from === index).map(([, to]) => rows[to]);
    const reads = graph.edges.some(([, to]) => to === index);
    if (!reads && readers.length) rows[index] = Math.min(...readers) - 1;
  });
  return rows;
}

/** The column of each box: the box that the picture is about and what it leads to stand first. */
function columnsOf(graph, rows) {
  const main = new Set();
  let at = graph.start;
  while (at !== undefined && !main.has(at)) {
    main.add(at);
    const next = graph.edges.filter(([from]) => from === at).map(([, to]) => to);
    at = next.find((to) => graph.boxes[to].role === 'norm') ?? next.find((to) => graph.boxes[to].role === 'add') ?? next[0];
  }
  const first = graph.edges.find(([, to]) => to === graph.start);
  if (first) main.add(graph.edges.filter(([, to]) => to === graph.start).sort((a, b) => rank(graph, a) - rank(graph, b))[0][0]);
  const used = new Map();
  const order = graph.boxes.map((_, index) => index).sort((a, b) => main.has(b) - main.has(a) || a - b);
  const columns = [];
  for (const index of order) {
    columns[index] = used.get(rows[index]) ?? 0;
    used.set(rows[index], columns[index] + 1);
  }
  return columns;
}

/** What makes the summands stands above a reduction; the residual stream beside it. */
const rank = (graph, [from]) => (['add', 'fused', 'reduction'].includes(graph.boxes[from].role) ? 1 : 0);

/** "mm → all_reduce; all_reduce → add": what a screen reader says instead of the picture. */
const inWords = (graph) =>
  graph.edges.map(([from, to, name]) =>
    `${graph.boxes[from].label} → ${graph.boxes[to].label}${name ? ` (${name})` : ''}`).join('; ');

function drawPicture(graph, title) {
  const rows = rowsOf(graph);
  const columns = columnsOf(graph, rows);
  const x = (index) => columns[index] * (BOX.width + BOX.gap) + 2;
  const y = (index) => rows[index] * BOX.row + 2;
  const width = (Math.max(...columns) + 1) * (BOX.width + BOX.gap) - BOX.gap + 4;
  const height = Math.max(...rows) * BOX.row + BOX.height + 4;
  const picture = svg('svg', {
    viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', class: 'picture', 'aria-label': `${title}: ${inWords(graph)}`,
  });
  for (const [from, to, name] of graph.edges) {
    const [x1, y1, x2, y2] = [x(from) + BOX.width / 2, y(from) + BOX.height, x(to) + BOX.width / 2, y(to)];
    const middle = (y1 + y2) / 2;
    const straight = rows[to] - rows[from] === 1 || x1 === x2;
    picture.append(svg('path', {
      d: straight ? `M${x1},${y1} C${x1},${middle} ${x2},${middle} ${x2},${y2 - 5}`
        : `M${x1},${y1} C${x1},${y2 - 30} ${x2},${y1 + 30} ${x2},${y2 - 5}`,
      class: 'edge',
    }));
    picture.append(svg('path', {d: `M${x2 - 4},${y2 - 7} L${x2},${y2 - 1} L${x2 + 4},${y2 - 7} Z`, class: 'head'}));
    if (name) picture.append(svg('text', {x: x1 + 0.8 * (x2 - x1), y: middle + 2, class: 'edge-name'}, name));
  }
  graph.boxes.forEach((box, index) => picture.append(drawBox(box, x(index), y(index), index === graph.start)));
  return picture;
}

function drawBox(box, x, y, main) {
  const lines = [...label(box), ...(box.shape ? [box.shape] : [])];
  const top = y + BOX.height / 2 - (lines.length - 1) * 6 + 3.5;
  return svg('g', {class: `box ${box.role}${main ? ' main' : ''}`},
    svg('title', {}, `${box.label}${box.count > 1 ? ` ×${box.count}` : ''} ${box.shape}`),
    svg('rect', {x, y, width: BOX.width, height: BOX.height, rx: 6}),
    lines.map((line, index) => svg('text', {
      x: x + BOX.width / 2, y: top + index * 12, class: box.shape && index === lines.length - 1 ? 'shape' : 'label',
    }, line)));
}

/** A label in lines of at most 15 letters, cut behind an underscore. */
function label(box) {
  const text = box.count > 1 ? `${box.label} ×${box.count}` : box.label;
  if (text.length <= 15) return [text];
  const cut = text.lastIndexOf('_', 14);
  const [first, second] = cut > 0 ? [text.slice(0, cut + 1), text.slice(cut + 1)] : [text.slice(0, 15), text.slice(15)];
  return [first, second.length > 15 ? `${second.slice(0, 14)}…` : second];
}
