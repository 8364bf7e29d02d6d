// An interaction between agents, turn by turn: one colour for each agent and its channels.

const voiceOf = (turn) => [turn.agent, ...turn.channels].join(" · ");

// The same colour in every rollout of the page: by the order of the names.
function voiceColour(turn) {
  view.voices ??= [...new Set(view.rollouts.flatMap((row) => row.turns.map(voiceOf)))].sort();
  return COLOURS[view.voices.indexOf(voiceOf(turn)) % COLOURS.length];
}

function transcript(row) {
  if (!row.turns.length) return [];
  const turns = row.turns.map((turn) => {
    const colour = voiceColour(turn);
    return el("div", { class: "turn", "data-turn-of": turn.agent, style: `border-color: ${colour}; background: ${colour}1a` },
      el("small", {}, el("b", { style: `color: ${colour}` }, turn.agent), ` round ${turn.round + 1}`, turn.channels.length ? ` · ${turn.channels.join(", ")}` : "",
        " ", turn.decision ? el("span", { class: "decision" }, turn.decision) : null),
      el("div", { class: "mono" }, turn.text));
  });
  return [el("h3", {}, `Transcript, ${turns.length} turns`), el("div", { id: "transcript" }, ...turns)];
}
