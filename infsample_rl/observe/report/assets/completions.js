// Recorded completions, to be filtered by step, kind and words; those with text are opened in place.
const PER_PAGE = 15;
const KINDS = [
  ['', 'all with text'],
  ['b', 'best of each step'],
  ['w', 'worst of each step'],
  ['r', 'random'],
  ['any', 'all recorded'],
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
  const items = found.rows.map((row) => Object.fromEntries(found.fields.map((name, place) => [name, row[place]])));
  const steps = [...new Set(items.map((item) => item.step))].sort((a, b) => a - b),
    withText = items.filter((item) => item.text >= 0).length;
  const shown = { step: '', kind: '', words: '', order: 'file', first: 0 },
    list = el('div', { class: 'completions' }),
    count = el('span', { class: 'quiet', role: 'status' });
  const textsOf = (item) => (item.text < 0 ? null : { prompt: found.prompts[found.texts[item.text][0]], response: found.texts[item.text][1] });
  const matches = (item) => {
    if (shown.step !== '' && item.step !== +shown.step) return false;
    if (shown.kind === '' ? item.text < 0 : shown.kind !== 'any' && !item.kinds.includes(shown.kind)) return false;
    if (!shown.words) return true;
    const texts = textsOf(item);
    return texts !== null && (texts.response.toLowerCase().includes(shown.words) || texts.prompt.toLowerCase().includes(shown.words));
  };
  const noneMatches = withText < items.length ? `none of the ${text(withText)} whose text is here matches` : 'none matches';
  const update = () => {
    const matching = items.filter(matches);
    if (ORDERS[shown.order][1]) matching.sort(ORDERS[shown.order][1]);
    shown.first = clamp(shown.first, 0, Math.max(0, Math.floor((matching.length - 1) / PER_PAGE) * PER_PAGE));
    const last = Math.min(matching.length, shown.first + PER_PAGE);
    count.textContent = matching.length ? `${text(shown.first + 1)} to ${text(last)} of ${text(matching.length)}` : noneMatches;
    back.disabled = shown.first === 0;
    on.disabled = last >= matching.length;
    list.replaceChildren(...matching.slice(shown.first, last).map((item) => completion(item, textsOf(item))));
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
  const missing = found.recorded - withText;
  const said = missing
    ? `The run recorded ${plural(found.recorded, 'completion')}; ${text(withText)} are here with their texts: best and worst of ` +
      `as many steps as fit, and a random choice. ${text(items.length)} are listed; every text is in completions.jsonl.`
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

function completion(item, texts) {
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
  if (texts === null) return el('article', { class: 'completion' }, head, rewards, el('p', { class: 'quiet' }, 'its text is in completions.jsonl'));
  const response = el('pre', { class: 'text clipped', dir: 'auto' }, texts.response || '(empty)');
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
    el('details', {}, el('summary', {}, 'prompt'), el('pre', { class: 'text', dir: 'auto' }, texts.prompt)),
    response,
    more,
  );
}
