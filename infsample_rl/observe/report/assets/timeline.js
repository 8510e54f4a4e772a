// Who decoded when: one prompt's samples in the rows of the rollout workers.
// Like cividis, in order for any eye, with ends that stand out from white and from black.
const RAMP = [
  [38, 86, 164],
  [98, 118, 150],
  [150, 148, 128],
  [202, 182, 96],
  [246, 214, 60],
];
function ramp(share) {
  const at = clamp(share, 0, 1) * (RAMP.length - 1),
    place = Math.min(RAMP.length - 2, Math.floor(at)),
    part = at - place;
  return RAMP[place].map((value, index) => Math.round(value + (RAMP[place + 1][index] - value) * part));
}
const BY = {
  reward: { label: 'reward', of: (sample) => sample.reward },
  length: { label: 'length (tokens)', of: (sample) => sample.length },
  error: { label: 'predicted / real length', of: (sample) => (sample.forecast ? clamp(sample.forecast[1] / sample.length, 0, 2) : null) },
};

function timelines(found) {
  const groups = found.groups,
    steps = [...new Set(groups.map((group) => group.step))];
  const shown = { group: groups.find((group) => group.step === steps[steps.length - 1]), axis: 'seconds', by: 'reward' };
  const holder = el('div', { class: 'plot scroll' }),
    facts = el('p', { class: 'legend' }),
    prompt = el('pre', { class: 'text', dir: 'auto' });
  const prompts = () => groups.filter((group) => group.step === shown.group.step);
  const promptChoice = choice('prompt', [], 0, (place) => {
    shown.group = prompts()[place];
    update();
  });
  const fillPrompts = () =>
    promptChoice.select.replaceChildren(...prompts().map((group, place) => el('option', { value: place }, `${group.prompt_index} of the batch`)));
  const update = () => {
    facts.replaceChildren(...timelineFacts(shown));
    prompt.textContent = shown.group.prompt;
    holder.redraw();
  };
  const controls = el(
    'div',
    { class: 'controls' },
    choice(
      'step',
      steps.map((step) => [step, text(step)]),
      shown.group.step,
      (step) => {
        shown.group = groups.find((group) => group.step === +step);
        fillPrompts();
        update();
      },
    ),
    promptChoice,
    choice(
      'across',
      [
        ['seconds', 'seconds'],
        ['steps', "each worker's running steps"],
      ],
      'seconds',
      (axis) => {
        shown.axis = axis;
        update();
      },
    ),
    choice(
      'colour',
      Object.entries(BY).map(([key, by]) => [key, by.label]),
      'reward',
      (by) => {
        shown.by = by;
        update();
      },
    ),
  );
  fillPrompts();
  drawn(holder, (width) => rowsPlot(shown, width));
  update();
  const kept =
    groups.length < found.recorded
      ? `${plural(groups.length, 'prompt')} of the ${text(found.recorded)} in samples.jsonl, spread over the run, are on this page.`
      : `All ${plural(groups.length, 'prompt')} in samples.jsonl are here.`;
  return [
    controls,
    holder,
    facts,
    el('details', {}, el('summary', {}, 'the prompt'), prompt),
    el(
      'p',
      { class: 'note' },
      'A bar is a sample in a decode row; one that stops short with a dark edge was preempted or waited, and goes on in another row. A stripe: steps that gave drafted tokens too, the stronger the more. ',
      'Where a row is empty it decoded other prompts or nothing. Hover or tap for the text. ',
      kept,
    ),
  ];
}

function timelineFacts({ group, by }) {
  const stays = group.samples.flatMap((sample) => sample.stays),
    rows = new Set(group.samples.flatMap((sample) => sample.stays.map((stay) => `${sample.worker} ${stay[0]}`)));
  const workers = new Set(group.samples.map((sample) => sample.worker)),
    seconds = Math.max(...stays.map((stay) => stay[4])),
    [low, high] = extent(group, by);
  const key = svg(
    'svg',
    { width: 90, height: 10, class: 'key', 'aria-hidden': 'true' },
    Array.from({ length: 30 }, (_, place) => svg('rect', { x: place * 3, width: 3.2, height: 10, fill: `rgb(${ramp(place / 29)})` })),
  );
  const scale =
    low === null
      ? [`no ${BY[by].label} is known`]
      : low === high
        ? [`${BY[by].label}: ${text(low)} of all`]
        : [BY[by].label, text(low), key, text(high)];
  return [
    el(
      'span',
      {},
      `${plural(group.samples.length, 'sample')} in ${plural(rows.size, 'row')} of ${plural(workers.size, 'worker')}, `,
      `${text(+seconds.toPrecision(3))} s, ${plural(stays.length - group.samples.length, 'pause')}`,
    ),
    el('span', { class: 'scale' }, scale.map((part) => el('span', {}, part))),
  ];
}
function extent(group, by) {
  const values = group.samples.map(BY[by].of).filter((value) => value !== null);
  if (by === 'error' && values.length) return [0, 2];
  return values.length ? [Math.min(...values), Math.max(...values)] : [null, null];
}

function rowsPlot({ group, axis, by }, width) {
  const [from, to] = axis === 'seconds' ? [3, 4] : [1, 2],
    rows = [
      ...new Map(group.samples.flatMap((sample) => sample.stays.map((stay) => [`${sample.worker} ${stay[0]}`, [sample.worker, stay[0]]]))).values(),
    ].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const place = new Map(rows.map(([worker, row], index) => [`${worker} ${row}`, index])),
    tall = rows.length > 48 ? 9 : rows.length > 24 ? 13 : 18,
    gap = 8;
  const above = rows.map((_, index) => new Set(rows.slice(0, index + 1).map((row) => row[0])).size - 1),
    top = (index) => 4 + index * tall + above[index] * gap;
  const height = top(rows.length - 1) + tall + 34,
    left = width < 520 ? 58 : 108,
    right = width - 10;
  const starts = Math.min(...group.samples.flatMap((sample) => sample.stays.map((stay) => stay[from]))),
    ends = Math.max(...group.samples.flatMap((sample) => sample.stays.map((stay) => stay[to])));
  const x = (value) => left + ((value - starts) / (ends - starts || 1)) * (right - left),
    [low, high] = extent(group, by);
  const root = svg('svg', {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: 'img',
    'aria-label': 'decode rows over time, a bar for each sample',
  });
  rows.forEach(([worker, row], index) => {
    root.append(svg('rect', { class: 'lane', x: left, y: top(index), width: right - left, height: tall - 2 }));
    const first = index === 0 || rows[index - 1][0] !== worker,
      name = width < 520 ? `${worker} · ${row}` : first ? `worker ${worker} · row ${row}` : `row ${row}`;
    if (tall > 9 || first) root.append(svg('text', { class: 'tick', x: left - 6, y: top(index) + tall / 2 + 3, 'text-anchor': 'end' }, name));
  });
  for (const value of ticks(starts, ends, Math.min(8, width / 90), axis === 'steps'))
    root.append(
      svg('path', { class: 'grid', d: `M${x(value)} 2V${height - 30}` }),
      svg('text', { class: 'tick', x: x(value), y: height - 16, 'text-anchor': 'middle' }, text(value)),
    );
  root.append(
    svg(
      'text',
      { class: 'tick quiet', x: right, y: height - 2, 'text-anchor': 'end' },
      axis === 'seconds' ? 'seconds since the first sample began' : "running steps of the worker's call",
    ),
  );
  for (const sample of group.samples) root.append(sampleBars(sample, { x, top, place, tall, from, to, low, high, by }));
  return root;
}

function sampleBars(sample, { x, top, place, tall, from, to, low, high, by }) {
  const value = BY[by].of(sample),
    rgb = value === null ? null : ramp(high === low ? 0.5 : (value - low) / (high - low));
  const dark = rgb && 0.3 * rgb[0] + 0.6 * rgb[1] + 0.1 * rgb[2] < 120,
    paint = rgb ? { fill: `rgb(${rgb})` } : { class: 'unknown' },
    group = svg('g', { class: 'sample', tabindex: -1 });
  sample.stays.forEach((stay, index) => {
    const y = top(place.get(`${sample.worker} ${stay[0]}`)),
      start = x(stay[from]),
      wide = Math.max(1, x(stay[to]) - start - 0.5);
    group.append(svg('rect', { ...paint, x: start, y, width: wide, height: tall - 2, rx: 1.5 }));
    const at = (step) => x(stay[from] + ((step - stay[1]) / (stay[2] - stay[1])) * (stay[to] - stay[from]));
    for (const [first, end, tokens] of accepted(stay))
      group.append(
        svg('rect', {
          class: dark ? 'accepted onDark' : 'accepted onLight',
          x: at(first),
          y: y + tall * 0.35,
          width: at(end) - at(first),
          height: tall * 0.2,
          opacity: Math.min(1, 0.3 + (0.1 * tokens) / (end - first)),
        }),
      );
    if (index < sample.stays.length - 1)
      group.append(svg('rect', { class: 'edge', x: start + Math.max(0, wide - 2.5), y, width: Math.min(2.5, wide), height: tall - 2 }));
    if (wide > 22 && tall > 12) group.append(svg('text', { class: dark ? 'onDark' : 'onLight', x: start + 4, y: y + tall / 2 + 3 }, sample.sample_index));
  });
  const move = (event) => {
    group.parentNode.classList.add('picking');
    group.classList.add('picked');
    showTip(event, ...sampleTip(sample));
  };
  const leave = () => {
    group.parentNode?.classList.remove('picking');
    group.classList.remove('picked');
    hideTip();
  };
  for (const [name, call] of [
    ['pointermove', move],
    ['pointerdown', move],
    ['pointerleave', leave],
  ])
    group.addEventListener(name, call);
  return group;
}

// Spans of steps that gave drafted tokens too; runs from before they were recorded have none.
const accepted = (stay) => stay[6] ?? [];

function sampleTip(sample) {
  const pauses = sample.stays.length - 1,
    first = sample.stays[0],
    last = sample.stays[sample.stays.length - 1];
  const lines = [
    ['reward', sample.reward === null ? 'none: failed' : text(sample.reward)],
    ['length', `${plural(sample.length, 'token')}, ${sample.finish_reason === 'length' ? 'cut at the maximum' : 'ended by itself'}`],
    ['predicted', sample.forecast ? `${text(sample.forecast[1])} tokens, when it had ${sample.forecast[0]}` : 'not'],
    [
      'decoded',
      `${text(+first[3].toFixed(3))} to ${text(+last[4].toFixed(3))} s, worker ${sample.worker}, ` +
        (pauses ? `rows ${sample.stays.map((stay) => stay[0]).join(', ')}` : `row ${first[0]}`),
    ],
  ];
  const drafted = sample.stays.flatMap(accepted).reduce((sum, span) => sum + span[2], 0);
  if (drafted) lines.push(['drafted', `${drafted} of its tokens`]);
  if (pauses) lines.push(['paused', pauses === 1 ? 'once' : `${pauses} times`]);
  return [
    el('b', {}, `sample ${sample.sample_index}`),
    tipLines(lines),
    sample.text === null ? null : el('p', { class: 'tiptext', dir: 'auto' }, sample.text),
  ];
}
