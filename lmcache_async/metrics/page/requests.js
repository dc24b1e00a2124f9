// The table of recent requests.

import { LOCAL, bar, colour, node } from "./dom.js";
import { causes, sub, sum, table } from "./tables.js";
import { bytes, count, rate, seconds, short } from "./words.js";

const DECIDED = {
  load: ["load", "good"],
  partial: ["load a part", "warn"],
  recompute: ["recompute", "warn"],
  local: ["vLLM's own", ""],
  miss: ["miss", ""],
  late: ["no answer in time", "bad"],
  off: ["not looked up", ""],
  other: ["another connector", ""],
};

function originOf(request) {
  const { plan, loaded } = request;
  const whole = plan ? plan.prompt_tokens : loaded ? loaded.asked_tokens : 0;
  const parts = [];
  if (plan && plan.local_tokens) parts.push([LOCAL, plan.local_tokens, "var(--local)"]);
  for (const [tier, tokens] of loaded ? loaded.by_tier : []) parts.push([tier, tokens, colour(tier)]);
  if (plan && plan.load_tokens && !loaded) parts.push(["loading", plan.load_tokens, "var(--faint)"]);
  const known = parts.reduce((total, part) => total + part[1], 0);
  if (whole > known) parts.push([plan ? "computed" : "not stored", whole - known, "var(--computed)"]);
  return { whole: Math.max(whole, known), parts };
}

function originCell(request) {
  const { whole, parts } = originOf(request);
  if (!whole) return "–";
  const text = parts.map(([name, tokens]) => `${name} ${count(tokens)}`).join(" · ");
  const drawn = parts.map(([name, tokens, fill]) => [tokens / whole, fill, `${name}: ${count(tokens)} tokens`]);
  return [bar(drawn, "bar plan"), sub(text)];
}

function decisionCell({ plan, loaded }) {
  if (plan) {
    const [text, cls] = DECIDED[plan.decided] || [plan.decided, ""];
    return node("span", { cls: `pill ${cls}` }, text);
  }
  return loaded ? node("span", { cls: loaded.tokens ? "pill good" : "pill" }, loaded.tokens ? "loaded" : "miss") : node("span", { cls: "pill" }, "store only");
}

function whyCell({ plan, loaded }) {
  const ended = loaded && loaded.ended_by ? `the load ended early: ${loaded.ended_by}` : "";
  return [plan && plan.why, ended].filter(Boolean).join("; ") || "–";
}

function decisions(decided) {
  const known = Object.entries(DECIDED).filter(([name]) => decided[name]);
  const counted = known.map(([name, [text]]) => `${text} ${short(decided[name])}`).join(", ");
  return counted ? `source and decision of each prompt; since the start: ${counted}` : "source and decision of each prompt";
}

export function requestTable(recent, now, decided) {
  const columns = [["Age", "number"], ["Request", "id apart"], ["Prompt from"], ["Decision"], ["Why", "text"], ["Load", "number"], ["Stored", "number"]];
  const rows = recent.map((request) => {
    const { loaded, stored } = request;
    const dropped = stored ? sum(stored.dropped) : 0;
    return [
      seconds(Math.max(1, Math.round(now - request.time))),
      node("td", { title: request.request }, request.request || "–"),
      originCell(request),
      decisionCell(request),
      whyCell(request),
      loaded ? [seconds(loaded.seconds), sub(rate(loaded.bytes, loaded.seconds))] : "–",
      stored ? [`${short(stored.tokens)} tokens`, dropped ? sub(`${count(dropped)} chunks dropped: ${causes(stored.dropped)}`) : sub(bytes(stored.bytes))] : "–",
    ];
  });
  return table("Recent requests", decisions(decided), columns, rows, "No requests yet.");
}
