// One step as its workers' phases, with the critical path through them.
const PHASE_COLOURS = {
  decode: 0,
  prefill: 4,
  reward: 5,
  reference: 3,
  forward: 2,
  backward: 1,
  optimizer: 6,
  sync: 7,
  learn: 3,
  sample: 0,
  update: 2,
  publish: 7,
  save: 5,
  evaluate: 4,
};
const WAIT = 'wait';

function tracePhases(trace) {
  const shown = { step: trace.steps[trace.steps.length - 1] };
  const holder = el('div', { class: 'plot scroll' }),
    below = el('div');
  const update = () => {
    below.replaceChildren(...pathTable(shown.step, trace.names));
    holder.redraw();
  };
  drawn(holder, (width) => ganttPlot(shown.step, trace.names, width));
  below.replaceChildren(...pathTable(shown.step, trace.names));
  return [
    el(
      'div',
      { class: 'controls' },
      choice(
        'step',
        trace.steps.map((step, place) => [place, text(step.step)]),
        trace.steps.length - 1,
        (place) => {
          shown.step = trace.steps[place];
          update();
        },
      ),
    ),
    holder,
    below,
  ];
}

function ganttPlot(step, names, width) {
  const tall = 20,
    left = width < 520 ? 70 : 96,
    right = width - 10,
    height = step.workers.length * tall + 40,
    x = (seconds) => left + (seconds / step.seconds) * (right - left),
    inside = (seconds) => clamp(seconds, 0, step.seconds);
  const root = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': 'phases of every worker over the step' });
  step.workers.forEach((name, index) =>
    root.append(
      svg('rect', { class: 'lane', x: left, y: index * tall + 2, width: right - left, height: tall - 3 }),
      svg('text', { class: 'tick', x: left - 6, y: index * tall + tall / 2 + 4, 'text-anchor': 'end' }, name),
    ),
  );
  for (const value of ticks(0, step.seconds, Math.min(8, width / 90)))
    root.append(
      svg('path', { class: 'grid', d: `M${x(value)} 0V${height - 36}` }),
      svg('text', { class: 'tick', x: x(value), y: height - 20, 'text-anchor': 'middle' }, text(value)),
    );
  root.append(svg('text', { class: 'tick quiet', x: right, y: height - 4, 'text-anchor': 'end' }, 'seconds of the step'));
  for (const [worker, name, start, seconds, depth] of step.bars) {
    const from = x(inside(start)),
      inset = Math.min(depth, 3) * 3,
      tell = (event) =>
        showTip(
          event,
          el('b', {}, names[name]),
          tipLines([
            ['worker', step.workers[worker]],
            ['from', `${text(start)} s`],
            ['took', `${text(seconds)} s`],
          ]),
        );
    root.append(
      svg('rect', {
        class: `bar ${phaseColour(names[name])}`,
        x: from,
        y: worker * tall + 2 + inset,
        width: Math.max(0.7, x(inside(start + seconds)) - from),
        height: Math.max(4, tall - 3 - 2 * inset),
        onpointermove: tell,
        onpointerdown: tell,
        onpointerleave: hideTip,
      }),
    );
  }
  const known = step.path.filter(([worker]) => worker >= 0),
    middle = (worker) => worker * tall + tall - 2;
  known.forEach(([worker, , start, seconds], index) => {
    root.append(svg('path', { class: 'critical', d: `M${x(start)} ${middle(worker)}H${x(start + seconds)}` }));
    const next = known[index + 1];
    if (next && next[0] !== worker)
      root.append(svg('path', { class: 'critical thin', d: `M${x(start + seconds)} ${middle(worker)}L${x(next[2])} ${middle(next[0])}` }));
  });
  return root;
}
const phaseColour = (name) => colour(PHASE_COLOURS[name] ?? 6);

function pathTable(step, names) {
  const seconds = new Map();
  for (const [, name, , took] of step.path) seconds.set(names[name], (seconds.get(names[name]) || 0) + took);
  const used = [...new Set(step.bars.map((bar) => names[bar[1]]))],
    rows = [...seconds.entries()]
      .sort((a, b) => b[1] - a[1])
      .map(([name, took]) => [
        name === WAIT ? 'wait: nobody on the path worked' : name,
        `${text(+took.toPrecision(3))} s`,
        `${Math.round((100 * took) / step.seconds)} %`,
      ]);
  return [
    el(
      'p',
      { class: 'legend' },
      [...new Set(used.map(phaseColour))].map((shade) =>
        el('span', {}, el('i', { class: `mark ${shade}` }), used.filter((name) => phaseColour(name) === shade).join(', ')),
      ),
      el(
        'span',
        {},
        svg('svg', { class: 'key', width: 18, height: 8, 'aria-hidden': 'true' }, svg('path', { class: 'critical', d: 'M0 4H18' })),
        'critical path',
      ),
    ),
    el(
      'p',
      { class: 'note' },
      'The critical path is what the step waited for: making anything else faster does not end it earlier.',
      step.left_out ? ` ${plural(step.left_out, 'worker')} off the path not shown.` : '',
    ),
    table(['on the critical path', 'time', 'of the step'], rows, [1, 2]),
  ];
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
