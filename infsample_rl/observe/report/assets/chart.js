// Lines over the steps as SVG: spec = {title, unit, note, log, stack, lines: [{label, colour, x, y, low, high, band}]}, from curves.py.
const COLOURS = 8;
const colour = (place) => `c${place % COLOURS}`;
const dash = (place) => ['', '7 3', '2 3', '9 3 2 3'][Math.floor(place / COLOURS) % 4];

function chart(spec) {
  const holder = el('div', { class: 'plot' });
  const lines = spec.stack ? stacked(spec.lines) : spec.lines;
  drawn(holder, (width) => plot(spec, lines, width));
  return el(
    'figure',
    { class: 'chart' },
    el('figcaption', {}, el('b', {}, spec.title), el('span', { class: 'unit' }, spec.unit)),
    holder,
    legend(spec),
    spec.note ? el('p', { class: 'note' }, spec.note) : null,
  );
}

function legend(spec) {
  const bands = [...new Set(spec.lines.map((line) => line.band).filter(Boolean))];
  return el(
    'p',
    { class: 'legend' },
    spec.lines.map((line) => el('span', {}, mark(line, spec.stack), line.label)),
    bands.map((band) => el('span', { class: 'quiet' }, `band: ${band}`)),
  );
}
const mark = (line, area) =>
  svg(
    'svg',
    { class: `key ${colour(line.colour)}`, width: 18, height: 8, 'aria-hidden': 'true' },
    area ? svg('rect', { width: 18, height: 8, class: 'area' }) : svg('path', { d: 'M0 4H18', class: 'line', 'stroke-dasharray': dash(line.colour) }),
  );

// Each line on top of the ones before; all have the same steps.
function stacked(lines) {
  const sums = lines[0].x.map(() => 0);
  return lines.map((line) => {
    const low = [...sums];
    line.y.forEach((value, place) => {
      sums[place] += value;
    });
    return { ...line, own: line.y, low, high: [...sums], y: [...sums] };
  });
}

function plot(spec, lines, width) {
  const height = 200,
    box = { left: 56, right: width - 22, top: 8, bottom: height - 36 };
  const { x, y, low, high } = scales(spec, lines, box);
  const root = svg('svg', {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: 'img',
    'aria-label': `${spec.title}, ${spec.unit}, over the steps`,
  });
  const yTicks = spec.log ? decades(low, high) : ticks(low, high, 4);
  for (const value of yTicks)
    root.append(
      svg('path', { class: 'grid', d: `M${box.left} ${y(value)}H${box.right}` }),
      svg('text', { class: 'tick', x: box.left - 6, y: y(value) + 4, 'text-anchor': 'end' }, inUnit(value, spec.unit)),
    );
  for (const value of ticks(x.low, x.high, Math.min(8, width / 70), true))
    root.append(svg('text', { class: 'tick', x: x(value), y: box.bottom + 15, 'text-anchor': 'middle' }, text(value)));
  root.append(svg('text', { class: 'tick quiet', x: box.right, y: height - 5, 'text-anchor': 'end' }, 'step'));
  const edge = (line, values) => line.x.map((value, place) => [x(value), y(values[place])]);
  for (const line of lines) {
    const points = edge(line, line.y);
    if (line.low)
      root.append(
        svg('path', {
          class: `${spec.stack ? 'area' : 'band'} ${colour(line.colour)}`,
          d: `${path([...edge(line, line.high), ...edge(line, line.low).reverse()])}Z`,
        }),
      );
    if (!spec.stack) root.append(svg('path', { class: `line ${colour(line.colour)}`, d: path(points), 'stroke-dasharray': dash(line.colour) }));
    if (!spec.stack && points.length <= 40)
      for (const [cx, cy] of points) root.append(svg('circle', { class: `dot ${colour(line.colour)}`, cx, cy, r: points.length < 15 ? 3 : 2 }));
  }
  root.append(hover(spec, lines, box, x, y));
  return root;
}
const path = (points) => `M${points.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join('L')}`;

function scales(spec, lines, box) {
  const xs = lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]);
  let left = Math.min(...xs),
    right = Math.max(...xs);
  if (left === right) {
    left -= 1;
    right += 1;
  }
  let low = Infinity,
    high = -Infinity;
  for (const line of lines)
    for (const values of [line.y, line.low, line.high])
      for (const value of values || []) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
  if (spec.stack) low = 0;
  if (spec.log && low > 0) {
    low = 10 ** Math.floor(Math.log10(low));
    high = 10 ** Math.ceil(Math.log10(high));
    if (low === high) high = low * 10;
  } else if (low === high) {
    const pad = Math.abs(low) * 0.1 || 1;
    low -= low === 0 ? 0 : pad;
    high += pad;
  } else {
    if (low > 0 && low < 0.4 * high) low = 0;
    const pad = (high - low) * 0.06;
    high += pad;
    if (low !== 0) low -= pad;
  }
  const scale = spec.log ? Math.log10 : (value) => value;
  const x = (value) => box.left + ((value - left) / (right - left)) * (box.right - box.left);
  x.low = left;
  x.high = right;
  const y = (value) =>
    box.bottom - ((scale(Math.max(value, spec.log ? low : -Infinity)) - scale(low)) / (scale(high) - scale(low))) * (box.bottom - box.top);
  return { x, y, low, high };
}
function decades(low, high) {
  const first = Math.round(Math.log10(low)),
    last = Math.round(Math.log10(high)),
    step = Math.max(1, Math.ceil((last - first) / 5)),
    found = [];
  for (let power = first; power <= last; power += step) found.push(10 ** power);
  return found;
}

// The nearest step under the pointer: its values in the tooltip, and marked.
function hover(spec, lines, box, x, y) {
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b),
    places = lines.map((line) => new Map(line.x.map((step, place) => [step, place])));
  const marks = svg('g', { class: 'marks', 'pointer-events': 'none' });
  const leave = () => {
    hideTip();
    marks.replaceChildren();
  };
  const move = (event) => {
    const at = event.clientX - area.getBoundingClientRect().left + box.left;
    const step = nearest(steps, (value) => x(value), at),
      found = [];
    marks.replaceChildren(svg('path', { class: 'cursor', d: `M${x(step)} ${box.top}V${box.bottom}` }));
    lines.forEach((line, index) => {
      const place = places[index].get(step);
      if (place === undefined) return;
      const value = (line.own || line.y)[place],
        range = line.low && !spec.stack ? ` (${inUnit(line.low[place], spec.unit)} to ${inUnit(line.high[place], spec.unit)})` : '';
      found.push([line.label || spec.title, inUnit(value, spec.unit) + range, colour(line.colour)]);
      marks.append(svg('circle', { class: `dot ${colour(line.colour)}`, cx: x(step), cy: y(line.y[place]), r: 4 }));
    });
    if (spec.stack) found.reverse();
    showTip(event, el('b', {}, `step ${text(step)}`), tipLines(found));
  };
  const area = svg('rect', {
    class: 'sensor',
    x: box.left,
    y: box.top,
    width: Math.max(0, box.right - box.left),
    height: box.bottom - box.top,
    onpointermove: move,
    onpointerdown: move,
    onpointerleave: leave,
  });
  return svg('g', {}, marks, area);
}
function nearest(sorted, position, at) {
  let low = 0,
    high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (position(sorted[middle]) < at) low = middle;
    else high = middle;
  }
  return Math.abs(position(sorted[low]) - at) <= Math.abs(position(sorted[high]) - at) ? sorted[low] : sorted[high];
}
