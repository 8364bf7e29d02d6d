// A page of runs that go on asks its server for what is new, again and again.

const PAUSE = 2000; // milliseconds between an answer and the next question
const follows = { cursor: 0, problems: [] };

async function ask() {
  const answer = await fetch(`data?since=${follows.cursor}`).then((found) => (found.ok ? found.json() : null), () => null);
  if (answer && answer.cursor !== follows.cursor) {
    Object.assign(follows, { cursor: answer.cursor, problems: answer.problems });
    show(answer.runs);
  }
  const said = answer ? follows.problems : ["Not connected: the command that serves this page has ended, or is out of reach.", ...follows.problems];
  $("#news").replaceChildren(...said.map((text) => el("p", { class: "note" }, text)));
}

async function follow() {
  for (;;) {
    await ask();
    await new Promise((done) => setTimeout(done, PAUSE));
  }
}

started.then(follow).catch(fail);
