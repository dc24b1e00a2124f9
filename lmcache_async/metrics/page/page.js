// Fetches status.json every two seconds. All of its content is inserted as text, never as markup.

import { at, node, place } from "./dom.js";
import { showCharts } from "./plot.js";
import { requestTable } from "./requests.js";
import { tenantTable, tierTable } from "./tables.js";
import { daemonTiles, engineTiles } from "./tiles.js";
import { seconds } from "./words.js";

const REFRESH_MS = 2000;
const TIMEOUT_MS = 5000;

function show(status) {
  const owners = status.tiers || status.tenants || [];
  place(owners.map((owner) => owner.id));
  document.title = `${status.title || "lmcache-async"} · ${status.kind}`;
  at("title").textContent = status.title || status.kind;
  const facts = [...status.facts, ["up", seconds(status.uptime_s)]];
  at("facts").replaceChildren(...facts.map(([name, value]) => node("div", {}, node("dt", {}, name), node("dd", {}, value))));
  const tiles = status.kind === "daemon" ? daemonTiles(status) : engineTiles(status);
  at("tiles").replaceChildren(...tiles.filter(Boolean));
  showCharts(status.charts);
  const tables = status.kind === "daemon" ? [tenantTable(status.tenants)] : [tierTable(status.tiers), requestTable(status.recent, status.time, status.totals.decided)];
  at("tables").replaceChildren(...tables);
}

function state(text, cls, notice = "") {
  at("state").textContent = text;
  at("state").className = `state ${cls}`;
  at("notice").textContent = notice;
  at("notice").hidden = !notice;
}

async function refresh() {
  try {
    const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (!answer.ok) throw new Error(`status ${answer.status} ${answer.statusText}`);
    show(await answer.json());
    state("live", "live");
  } catch (error) {
    state("no answer", "lost", `No answer (${error.message}). The values may be outdated. The page retries every two seconds.`);
  }
}

async function run() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
run();
