// Key figures at the top of the page.

import { bar, node } from "./dom.js";
import { circuits } from "./tables.js";
import { BINARY, bytes, count, digits, percent, rate, scaled, short } from "./words.js";

function tile(label, value, unit, note, options = {}) {
  return node(
    "div",
    { cls: "card tile" },
    node("p", { cls: "label" }, label),
    node("p", { cls: `value ${options.state || ""}` }, value, unit ? node("small", {}, ` ${unit}`) : null),
    options.bar || null,
    node("p", { cls: "note" }, note),
  );
}

function memoryTile(label, used, most, note) {
  const [value, unit] = scaled(used, 1024, BINARY);
  const parts = [[Math.min(1, most ? used / most : 0), "var(--accent)"]];
  return tile(label, digits(value), `${unit} of ${bytes(most)}`, note, { bar: bar(parts) });
}

function breakerTile(tiers) {
  const guarded = tiers.filter((tier) => tier.breaker);
  const away = guarded.filter((tier) => Object.values(tier.breaker).some((state) => state !== "closed"));
  if (!guarded.length) return null;
  if (!away.length) return tile("Breakers", "closed", "", `all calls reach ${guarded.map((tier) => tier.id).join(", ")}`, { state: "good" });
  const open = away.map((tier) => `${tier.id}: ${circuits(tier.breaker)}`).join("; ");
  return tile("Breakers", "open", "", open, { state: "bad" });
}

export function engineTiles(status) {
  const { totals, memory, work } = status;
  const share = totals.prompt_tokens ? totals.hit_tokens / totals.prompt_tokens : null;
  const [loaded, loadedUnit] = scaled(totals.loaded_bytes, 1024, BINARY);
  const [stored, storedUnit] = scaled(totals.stored_bytes, 1024, BINARY);
  return [
    tile(
      "From the cache",
      share === null ? "–" : percent(Math.min(1, share)),
      "",
      `${short(totals.hit_tokens)} of ${short(totals.prompt_tokens)} prompt tokens`,
    ),
    tile("Loaded", digits(loaded), loadedUnit, `${rate(totals.loaded_bytes, totals.load_seconds)} while loading`),
    tile("Stored", digits(stored), storedUnit, `${rate(totals.stored_bytes, totals.store_copy_seconds)} while copying`),
    tile("Running", count(work.running), work.running === 1 ? "call" : "calls", `${count(work.pinned_chunks)} pinned chunks, ${count(work.late_calls)} late calls`),
    memoryTile("Host memory", memory.leased_bytes, memory.bytes, `at most ${bytes(memory.peak_leased_bytes)} so far`),
    breakerTile(status.tiers),
  ];
}

export function daemonTiles(status) {
  const { pool, tenants } = status;
  const sum = (name) => tenants.reduce((total, tenant) => total + tenant[name], 0);
  return [
    memoryTile("Pool", pool.bytes, pool.max_bytes, `${bytes(pool.unused_bytes)} not used so far`),
    tile("Records", short(sum("chunks")), "", `${count(tenants.length)} tenants`),
    tile("Clients", count(pool.clients), "", "connections of engines on this host"),
    tile("Leases", count(sum("readers") + sum("writers")), "", `${count(sum("readers"))} read, ${count(sum("writers"))} write`),
    tile("Evictions", short(sum("evictions")), "", "records evicted to make room"),
  ];
}
