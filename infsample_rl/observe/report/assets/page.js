// The page from top to bottom.
const single = page.runs.length === 1;
const sections = [];
function section(id, title, ...children) {
  const found = children.flat(Infinity).filter((child) => child !== null && child !== undefined);
  if (found.length) sections.push(el('section', { id }, el('h2', {}, title), found));
}
const charts = (specs) => (specs && specs.length ? el('div', { class: 'charts' }, specs.map(chart)) : null);

function header() {
  const rows = page.runs.map((run) => el('span', {}, run.folder));
  return el(
    'header',
    { class: 'top' },
    el('h1', {}, page.title),
    single ? el('p', {}, page.description) : null,
    el('p', { class: 'quiet' }, single ? rows : null, el('span', {}, `written ${page.written}`)),
  );
}
const headline = () =>
  single
    ? el(
        'div',
        { class: 'cards' },
        page.figures.map(([name, said]) => {
          const [value, what] = said.split(' (');
          return el('div', { class: 'card' }, el('span', {}, name), el('b', {}, value), what ? el('small', {}, what.replace(/\)$/, '')) : null);
        }),
      )
    : null;

function notices() {
  const missing = page.notes.map(([run, note]) => el('li', {}, single ? note : `${run}: ${note}`));
  const warnings = page.runs.flatMap((run) => run.warnings.map((warning) => el('li', {}, single ? warning : `${run.label}: ${warning}`)));
  return [
    missing.length
      ? el(
          'details',
          { class: 'notice', open: true },
          el('summary', {}, `${plural(missing.length, 'thing')} missing or damaged`),
          el('ul', {}, missing),
        )
      : null,
    warnings.length
      ? el('details', { class: 'notice' }, el('summary', {}, `last ${plural(warnings.length, 'warning')}`), el('ul', {}, warnings))
      : null,
  ];
}

function explorer() {
  const names = Object.keys(page.metrics);
  if (!names.length) return null;
  const holder = el('div', { class: 'wide' }, chart(page.metrics[names[0]]));
  const chosen = choice(
    'metric',
    names.map((name) => [name, name]),
    names[0],
    (name) => holder.replaceChildren(chart(page.metrics[name])),
  );
  return [el('div', { class: 'controls' }, chosen), holder];
}

function planned() {
  return (page.plan || []).map((process) => {
    const rows = process.lines.map(([name, size]) => [name, bytes(size)]);
    rows.push(
      [el('b', {}, 'predicted: the sum'), el('b', {}, bytes(process.sum))],
      ...process.measured.map(([name, size]) => [el('b', {}, `measured: ${name}`), el('b', {}, bytes(size))]),
    );
    return el('div', { class: 'planned' }, el('h3', {}, process.role), table(['', 'bytes'], rows, [1]));
  });
}

function settingsTable() {
  if (!page.settings || !page.settings.length) return null;
  const holder = el('div'),
    shown = { all: false, words: '' };
  const update = () => {
    const rows = page.settings.filter(
      ([name, value, usual]) => (shown.all || shown.words || usual !== null) && `${name} ${value}`.toLowerCase().includes(shown.words),
    );
    holder.replaceChildren(
      rows.length
        ? table(
            ['setting', 'value', 'default'],
            rows.map(([name, value, usual]) => [name, value, usual === null ? 'the same' : usual]),
            [],
            'settings',
          )
        : el('p', { class: 'quiet' }, 'none'),
    );
  };
  const search = el('input', {
    type: 'search',
    placeholder: 'name or value',
    'aria-label': 'name or value of a setting',
    oninput: () => {
      shown.words = search.value.toLowerCase();
      update();
    },
  });
  update();
  return [
    el(
      'div',
      { class: 'controls' },
      choice(
        'show',
        [
          ['', 'those that differ from the default'],
          ['all', 'all'],
        ],
        '',
        (value) => {
          shown.all = value === 'all';
          update();
        },
      ),
      search,
    ),
    holder,
  ];
}

const names = page.runs.map((run) => run.label);
const marked = (label, place) => (single ? label : el('span', {}, mark({ colour: place }), label));
if (!single) {
  section('figures', 'What came out', table(['', ...names.map(marked)], page.figures));
  section(
    'differences',
    'Settings that differ',
    page.differences.length
      ? table(['setting', ...names], page.differences, [], 'settings')
      : el('p', { class: 'quiet' }, 'none that is in both config.yaml'),
  );
}
section('learning', 'Learning', charts(page.learning));
section('policy', 'Policy and update', charts(page.policy));
if (page.timelines) section('rows', 'Who decoded when', timelines(page.timelines));
section('predictor', 'Length prediction', charts(page.predictor));
section('time', 'Time', charts([...(page.phases ? [page.phases] : []), ...page.speed]));
section('memory', 'Memory', planned(), charts(page.memory));
if (page.completions) section('completions', 'Completions', completionList(page.completions));
section('metrics', 'Every metric', explorer());
if (single) section('settings', 'Settings', settingsTable());
section('versions', 'Versions', page.versions.length ? table(['', ...(single ? [''] : names)], page.versions) : null);

document.body.append(
  header(),
  ...[headline(), ...notices()].filter(Boolean),
  el(
    'nav',
    {},
    sections.map((part) => el('a', { href: `#${part.id}` }, part.firstChild.textContent)),
  ),
  el('main', {}, sections),
  tip,
);
if (!sections.length) document.body.append(el('p', { class: 'quiet' }, 'Nothing was recorded yet.'));
document.addEventListener('scroll', hideTip, { passive: true, capture: true });
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape') hideTip();
});
