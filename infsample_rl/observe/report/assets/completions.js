// Recorded completions, to be filtered by step, kind and words.
const PER_PAGE = 15;
const KINDS = [
  ['', 'all'],
  ['b', 'best of each step'],
  ['w', 'worst of each step'],
  ['r', 'random'],
];
const ORDERS = {
  file: ['as recorded', null],
  high: ['reward, highest first', (a, b) => rank(b.reward) - rank(a.reward)],
  low: ['reward, lowest first', (a, b) => rank(a.reward, 1) - rank(b.reward, 1)],
  long: ['longest first', (a, b) => b.length - a.length],
  new: ['newest first', (a, b) => b.step - a.step],
};
const rank = (reward, sign = -1) => (reward === null ? sign * Infinity : reward);

function completionList(found) {
  const items = found.rows;
  const steps = [...new Set(items.map((item) => item.step))].sort((a, b) => a - b);
  const shown = { step: '', kind: '', words: '', order: 'file', first: 0 },
    list = el('div', { class: 'completions' }),
    count = el('span', { class: 'quiet', role: 'status' });
  const promptOf = (item) => found.prompts[item.prompt];
  const matches = (item) => {
    if (shown.step !== '' && item.step !== +shown.step) return false;
    if (!item.kinds.includes(shown.kind)) return false;
    return [item.response, promptOf(item)].some((words) => words.toLowerCase().includes(shown.words));
  };
  const update = () => {
    const matching = items.filter(matches);
    if (ORDERS[shown.order][1]) matching.sort(ORDERS[shown.order][1]);
    shown.first = clamp(shown.first, 0, Math.max(0, Math.floor((matching.length - 1) / PER_PAGE) * PER_PAGE));
    const last = Math.min(matching.length, shown.first + PER_PAGE);
    count.textContent = matching.length ? `${text(shown.first + 1)} to ${text(last)} of ${text(matching.length)}` : 'none matches';
    back.disabled = shown.first === 0;
    on.disabled = last >= matching.length;
    list.replaceChildren(...matching.slice(shown.first, last).map((item) => completion(item, promptOf(item))));
  };
  const turn = (by) => {
    shown.first += by;
    update();
    list.scrollIntoView({ block: 'nearest' });
  };
  const back = el('button', { type: 'button', onclick: () => turn(-PER_PAGE) }, '‹ before'),
    on = el('button', { type: 'button', onclick: () => turn(PER_PAGE) }, 'next ›');
  const set = (name) => (value) => {
    shown[name] = value;
    shown.first = 0;
    update();
  };
  const search = el('input', {
    type: 'search',
    placeholder: 'words in prompt or response',
    'aria-label': 'words in prompt or response',
    oninput: () => set('words')(search.value.toLowerCase()),
  });
  update();
  const said =
    items.length < found.recorded
      ? `The run recorded ${plural(found.recorded, 'completion')}; ${text(items.length)} are here: best and worst of as many ` +
        'steps as fit, and a random choice. Every one is in completions.jsonl.'
      : `All ${plural(found.recorded, 'recorded completion')} are here.`;
  return [
    el(
      'p',
      { class: 'note' },
      said,
      ' Best and worst are those of the recorded samples of a step, by reward, then by how far the advantage is from 0.',
    ),
    el(
      'div',
      { class: 'controls' },
      choice('show', KINDS, '', set('kind')),
      choice('step', [['', 'every'], ...steps.map((step) => [step, text(step)])], '', set('step')),
      choice(
        'order',
        Object.entries(ORDERS).map(([key, [name]]) => [key, name]),
        'file',
        set('order'),
      ),
      search,
    ),
    el('div', { class: 'controls' }, back, on, count),
    list,
  ];
}

// what was sampled, and between it, quieter, what an environment said
function turns(item) {
  const pieces = [];
  let end = 0;
  for (const [from, to] of item.observed) {
    pieces.push(item.response.slice(end, from), el('span', { class: 'observed', title: 'observed' }, item.response.slice(from, to)));
    end = to;
  }
  return [...pieces, item.response.slice(end)];
}

function completion(item, prompt) {
  const names = { b: 'best', w: 'worst', r: 'random' },
    parts = Object.entries(item.components);
  const facts = [
    `step ${text(item.step)}`,
    `prompt ${text(item.prompt_index)}`,
    `sample ${text(item.sample_index)}`,
    `advantage ${text(item.advantage)}`,
    plural(item.length, 'token'),
    item.finish_reason === 'length' ? 'cut at the maximum' : 'ended by itself',
  ];
  if (item.turn_rewards.length > 1) facts.push(`rewards of turns ${item.turn_rewards.map(text).join(', ')}`);
  const head = el(
    'header',
    {},
    el('b', { class: 'reward' }, item.reward === null ? 'no reward' : `reward ${text(item.reward)}`),
    [...item.kinds].filter((kind) => kind !== 'r').map((kind) => el('span', { class: `tag ${names[kind]}` }, names[kind])),
    facts.map((fact) => el('span', {}, fact)),
  );
  const rewards =
    parts.length > 1 || (parts.length && parts[0][1] !== item.reward)
      ? el(
          'p',
          { class: 'legend' },
          parts.map(([name, value]) => el('span', {}, `${name}: ${value === null ? 'failed' : text(value)}`)),
        )
      : null;
  const response = el('pre', { class: 'text clipped', dir: 'auto' }, item.response ? turns(item) : '(empty)');
  const more = el(
    'button',
    {
      type: 'button',
      class: 'more',
      hidden: true,
      onclick: () => {
        more.textContent = response.classList.toggle('clipped') ? 'show all' : 'show less';
      },
    },
    'show all',
  );
  requestAnimationFrame(() => {
    more.hidden = response.scrollHeight <= response.clientHeight + 2;
    if (!more.hidden) response.classList.add('long');
  });
  return el(
    'article',
    { class: 'completion' },
    head,
    rewards,
    el('details', {}, el('summary', {}, 'prompt'), el('pre', { class: 'text', dir: 'auto' }, prompt)),
    response,
    more,
  );
}
