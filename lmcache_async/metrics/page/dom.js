// Creates elements from text. Markup is never parsed.

const SVG = "http://www.w3.org/2000/svg";
export const LOCAL = "vLLM itself";

export const at = (id) => document.getElementById(id);

export function node(name, options = {}, ...children) {
  const made = document.createElement(name);
  const { cls, title, style, ...rest } = options;
  if (cls) made.className = cls;
  if (title) made.title = title;
  Object.assign(made.style, style || {});
  for (const [key, value] of Object.entries(rest)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function bar(parts, cls = "bar") {
  const made = node("div", { cls });
  for (const [part, fill, title] of parts) {
    if (part > 0) made.append(node("span", { title, style: { width: `${100 * part}%`, background: fill } }));
  }
  return made;
}

// A tier has the same colour everywhere.
let places = new Map();

export function place(names) {
  places = new Map(names.map((name, index) => [name, index]));
}

export function colour(name, index = 0) {
  if (name === LOCAL) return "var(--local)";
  return `var(--s${(places.has(name) ? places.get(name) : index + 5) % 8})`;
}
