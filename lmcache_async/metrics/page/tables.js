// Tables of tiers and tenants.

import { bar, colour, node } from "./dom.js";
import { bytes, count, rate, short } from "./words.js";

export function table(title, note, columns, rows, empty) {
  const head = columns.map(([name, cls]) => node("th", { cls: cls || "", scope: "col" }, name));
  const body = rows.map((cells) =>
    node("tr", {}, ...cells.map((cell, index) => {
      const made = cell instanceof Node && cell.nodeName === "TD" ? cell : node("td", {}, ...[cell].flat());
      made.classList.add(...(columns[index][1] || "").split(" ").filter(Boolean));
      return made;
    })),
  );
  return node(
    "div",
    { cls: "card" },
    node("div", { cls: "head" }, node("h2", {}, title), node("p", {}, note)),
    rows.length
      ? node("div", { cls: "scroll" }, node("table", { "aria-label": title }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...body)))
      : node("p", { cls: "empty" }, empty),
  );
}

export const sub = (text) => node("span", { cls: "sub" }, text);
export const sum = (counts) => Object.values(counts).reduce((total, one) => total + one, 0);
export const causes = (counts) => Object.entries(counts).map(([cause, number]) => `${cause} ${count(number)}`).join(", ");

function room(held, most) {
  if (most === null) return [bytes(held), sub("no limit of its own")];
  return [bar([[Math.min(1, most ? held / most : 0), "var(--accent)"]]), sub(`${bytes(held)} of ${bytes(most)}`)];
}

export function circuits(breaker) {
  return Object.entries(breaker)
    .filter(([, state]) => state !== "closed")
    .map(([name, state]) => `${name}s ${state}`)
    .join(", ");
}

function breakerCell(breaker) {
  if (!breaker) return "–";
  const open = circuits(breaker);
  if (!open) return node("span", { cls: "pill good" }, "closed");
  return node("span", { cls: open.includes(" open") ? "pill bad" : "pill warn" }, open);
}

function troubled(counts) {
  const total = sum(counts);
  return total ? [count(total), node("span", { cls: "sub causes" }, causes(counts))] : "0";
}

function queueCell(queue) {
  if (!queue) return "–";
  const refused = queue.refused ? `, ${count(queue.refused)} refused` : "";
  return [bytes(queue.bytes), sub(`${count(queue.chunks)} chunks${refused}`)];
}

function callSpeed(calls, names) {
  const used = names.map((name) => calls[name]).filter(Boolean);
  return rate(used.reduce((total, one) => total + one.bytes, 0), used.reduce((total, one) => total + one.seconds, 0));
}

export function tierTable(tiers) {
  const columns = [["Tier", "name"], ["Holds"], ["Chunks", "number"], ["Hits", "number"], ["Stored", "number"], ["Read / write", "number"], ["Queue", "number"], ["Errors", "number"], ["Dropped", "number"], ["Evicted", "number"], ["Breaker", "apart"]];
  const rows = tiers.map((tier) => [
    [node("span", { cls: "swatch", style: { background: colour(tier.id) } }), tier.id],
    room(tier.bytes, tier.max_bytes),
    short(tier.chunks),
    [short(tier.hit_chunks), sub(`${short(tier.hit_tokens)} tokens`)],
    [short(tier.stored_chunks), tier.promoted_chunks ? sub(`${short(tier.promoted_chunks)} promoted`) : null],
    tier.in_place ? ["in place", sub("nothing is copied")] : [callSpeed(tier.calls, ["get", "get_many"]), sub(callSpeed(tier.calls, ["put", "put_many"]))],
    queueCell(tier.queue),
    tier.corrupt ? [...[troubled(tier.errors)].flat(), sub(`${count(tier.corrupt)} corrupt`)] : troubled(tier.errors),
    troubled(tier.dropped),
    short(tier.evictions),
    breakerCell(tier.breaker),
  ]);
  return table("Tiers", "fastest first; counts since the start", columns, rows, "No tiers.");
}

export function tenantTable(tenants) {
  const columns = [["Tenant", "name"], ["Holds"], ["Records", "number"], ["Readers", "number"], ["Writers", "number"], ["Evicted", "number"]];
  const rows = tenants.map((tenant) => [
    [node("span", { cls: "swatch", style: { background: colour(tenant.id) } }), tenant.id],
    room(tenant.bytes, tenant.max_bytes),
    short(tenant.chunks),
    count(tenant.readers),
    count(tenant.writers),
    short(tenant.evictions),
  ]);
  return table("Tenants", "records in the pool", columns, rows, "No records yet.");
}
