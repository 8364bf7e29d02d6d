// All data come in here: what was there at first, and what came later, if the runs are followed.

function receive(entries) {
  entries.forEach(({ metrics, blocks, replaced, kept = blocks.length, ...about }, place) => {
    const run = view.runs[place] ??= { rows: new Map(), blocks: [] };
    Object.assign(run, about);
    if (replaced) {
      run.rows.clear();
      run.blocks = [];
    }
    for (const row of metrics) {
      run.rows.set(row.iteration, row);
      Object.keys(row).forEach((name) => view.metrics.add(name));
    }
    run.metrics = [...run.rows.values()].sort((a, b) => a.iteration - b.iteration);
    for (const block of blocks) {
      Object.assign(pictures, block.pictures);
      for (const row of block.rollouts) Object.assign(row, { run: place, block });
    }
    const all = [...run.blocks, ...blocks];
    run.blocks = all.slice(all.length - kept); // the server has forgotten the others
  });
  view.rollouts = view.runs.flatMap((run) => run.blocks.flatMap((block) => block.rollouts));
  view.rollouts.forEach((row, place) => { row.place = place; });
  view.parts = view.voices = null;
}
