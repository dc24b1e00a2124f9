// Formatting of numbers.

export const BINARY = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const DECIMAL = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];

export function scaled(value, base, units) {
  let step = 0;
  while (Math.abs(value) >= base && step < units.length - 1) {
    value /= base;
    step += 1;
  }
  return [value, units[step]];
}

export function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size === 0 || size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
}

const words = ([value, unit]) => `${digits(value)} ${unit}`;
export const bytes = (value) => words(scaled(value, 1024, BINARY));
export const speed = (value) => words(scaled(value, 1000, DECIMAL));
export const percent = (value) => `${digits(100 * value)} %`;
export const count = (value) => value.toLocaleString("en-US");
export const short = (value) => (value < 10000 ? count(value) : words(scaled(value, 1000, ["", "k", "M", "G", "T"])).replace(" ", ""));
export const rate = (nbytes, seconds) => (seconds > 0 && nbytes > 0 ? speed(nbytes / seconds) : "–");

export function seconds(value) {
  if (value < 1) return `${digits(value * 1000)} ms`;
  if (value < 120) return `${digits(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${digits(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

export const WRITTEN = {
  share: percent,
  bytes,
  "bytes/s": speed,
  "tokens/s": (value) => `${short(Math.round(value))}/s`,
  count: (value) => digits(value),
};
