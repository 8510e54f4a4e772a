// Elements, numbers as text, the one tooltip. Text from runs is only ever put into text nodes.
const page = JSON.parse(document.getElementById('page').textContent);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

// 1234567 -> "1,234,567"; 0.000012345 -> "1.23e-5"; null -> "–"
function text(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9))
    return value
      .toExponential(2)
      .replace(/\.?0+e/, 'e')
      .replace('e+', 'e');
  return value.toLocaleString('en-US', { maximumFractionDigits: size >= 1000 ? 0 : size >= 10 ? 2 : 4 });
}
function bytes(value) {
  if (value === null || value === undefined) return '–';
  for (const [size, unit] of [
    [1e12, 'TB'],
    [1e9, 'GB'],
    [1e6, 'MB'],
    [1e3, 'kB'],
  ])
    if (Math.abs(value) >= size) return `${text(+(value / size).toPrecision(4))} ${unit}`;
  return `${text(value)} B`;
}
const inUnit = (value, unit) => (unit === 'bytes' ? bytes(value) : text(value));
const plural = (count, word) => `${text(count)} ${word}${count === 1 ? '' : 's'}`;
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

const tip = el('div', { class: 'tip', role: 'status', hidden: true });
function showTip(event, ...nodes) {
  tip.replaceChildren(...nodes.flat(Infinity).filter((node) => node !== null));
  tip.hidden = false;
  const { innerWidth: width, innerHeight: height } = window;
  const left = event.clientX + 14 + tip.offsetWidth > width ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14;
  const top = event.clientY + 14 + tip.offsetHeight > height ? event.clientY - 14 - tip.offsetHeight : event.clientY + 14;
  tip.style.left = `${clamp(left, 4, Math.max(4, width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${clamp(top, 4, Math.max(4, height - tip.offsetHeight - 4))}px`;
}
const hideTip = () => {
  tip.hidden = true;
};
// Lines of a tooltip: [name, value, class of the colour mark or null]
const tipLines = (lines) =>
  el(
    'dl',
    {},
    lines.map(([name, value, mark]) => [el('dt', {}, mark ? el('i', { class: `mark ${mark}` }) : null, name), el('dd', {}, value)]),
  );

// Draws into `holder` whenever its width changes.
function drawn(holder, draw) {
  let before = 0;
  new ResizeObserver(() => {
    const width = Math.floor(holder.clientWidth);
    if (width > 0 && width !== before) {
      before = width;
      holder.replaceChildren(draw(width));
    }
  }).observe(holder);
  holder.redraw = () => {
    if (before) holder.replaceChildren(draw(before));
  };
  return holder;
}

// A labelled drop-down; options are [value, text].
function choice(label, options, value, changed) {
  const select = el(
    'select',
    { onchange: () => changed(select.value) },
    options.map(([key, name]) => el('option', { value: key, selected: String(key) === String(value) }, name)),
  );
  const whole = el('label', { class: 'choice' }, el('span', {}, label), select);
  whole.select = select;
  return whole;
}

// Steps of an axis from `low` to `high`: 1, 2 or 5 times a power of ten apart, about `count` of them.
function ticks(low, high, count, whole) {
  const rough = (high - low || 1) / Math.max(1, count),
    power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step)
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return found;
}

// A table that scrolls in itself; `numbers`: places of columns that are aligned right.
function table(head, rows, numbers = [], classes = '') {
  return el(
    'div',
    { class: 'scroll' },
    el(
      'table',
      { class: classes },
      el(
        'thead',
        {},
        el(
          'tr',
          {},
          head.map((name, place) => el('th', { class: numbers.includes(place) ? 'number' : null, scope: 'col' }, name)),
        ),
      ),
      el(
        'tbody',
        {},
        rows.map((row) =>
          el(
            'tr',
            {},
            row.map((cell, place) => el('td', { class: numbers.includes(place) ? 'number' : null, dir: 'auto' }, cell)),
          ),
        ),
      ),
    ),
  );
}
