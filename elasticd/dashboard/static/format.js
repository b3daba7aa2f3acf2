// @ts-check
/** Numbers, times and sizes as people read them. Every page writes them by these functions, so that one
 * quantity has one form. */

/** @param {number | null | undefined} value */
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const NOTHING = "–";

/** @param {number | null | undefined} value  @param {number} [digits] */
export function number(value, digits = 0) {
  if (!known(value)) return NOTHING;
  return written(digits).format(/** @type {number} */ (value));
}

/** @type {Map<number, Intl.NumberFormat>} By digits: to make one takes longer than to use it. */
const writers = new Map();

/** @param {number} digits */
function written(digits) {
  let found = writers.get(digits);
  if (!found) {
    found = new Intl.NumberFormat("en-US", {
      minimumFractionDigits: digits,
      maximumFractionDigits: digits,
    });
    writers.set(digits, found);
  }
  return found;
}

const small = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });

/** Three significant digits or so: 0.3, 0.0312, 2.50, 31.2, 3,120. @param {number | null | undefined} value */
export function figure(value) {
  if (!known(value)) return NOTHING;
  const size = Math.abs(/** @type {number} */ (value));
  if (size < 1) return small.format(/** @type {number} */ (value));
  return number(value, size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

/** "3.00x". @param {number | null | undefined} value */
export const slowdown = (value) => (known(value) ? `${number(value, 2)}x` : NOTHING);

/** @param {number | null | undefined} value  @param {number} [digits] */
export const percent = (value, digits = 1) =>
  known(value) ? `${number(100 * /** @type {number} */ (value), digits)} %` : NOTHING;

/** "42 ms", "1.24 s", "3 min 20 s", "5 h 2 min". @param {number | null | undefined} value @returns {string} */
export function seconds(value) {
  if (!known(value)) return NOTHING;
  const size = /** @type {number} */ (value);
  if (size < 0) return `−${seconds(-size)}`;
  if (size === 0) return "0 s";
  if (size < 0.001) return `${number(size * 1e6)} µs`;
  if (size < 0.9995) return `${number(size * 1e3, size < 0.01 ? 1 : 0)} ms`;
  if (size < 59.95) return `${number(size, size < 10 ? 2 : 1)} s`;
  return age(size);
}

/** Whole units: "12 s", "3 min 20 s", "5 h 2 min", "4 d 3 h". @param {number | null | undefined} value */
export function age(value) {
  if (!known(value)) return NOTHING;
  const whole = Math.max(0, Math.round(/** @type {number} */ (value)));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return two(whole, 60, "min", 1, "s");
  if (whole < 86400) return two(whole, 3600, "h", 60, "min");
  return two(whole, 86400, "d", 3600, "h");
}

/** @param {number} whole  @param {number} large  @param {string} a  @param {number} small  @param {string} b */
function two(whole, large, a, small, b) {
  const rest = Math.floor((whole % large) / small);
  return `${Math.floor(whole / large)} ${a}${rest ? ` ${rest} ${b}` : ""}`;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (!known(value)) return NOTHING;
  let size = /** @type {number} */ (value);
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${number(size, unit === 0 || size >= 100 ? 0 : 1)} ${UNITS[unit]}`;
}

/** @param {number} value  @param {number} [size] */
const padded = (value, size = 2) => String(value).padStart(size, "0");

/** The clock of the reader's zone. @param {number | null | undefined} unix  seconds */
export function clock(unix) {
  if (!known(unix)) return NOTHING;
  const at = new Date(1e3 * /** @type {number} */ (unix));
  return `${padded(at.getHours())}:${padded(at.getMinutes())}:${padded(at.getSeconds())}`;
}

/** Date and clock. @param {number | null | undefined} unix  seconds */
export function moment(unix) {
  if (!known(unix)) return NOTHING;
  const at = new Date(1e3 * /** @type {number} */ (unix));
  return `${at.getFullYear()}-${padded(at.getMonth() + 1)}-${padded(at.getDate())} ${clock(unix)}`;
}

/** "1 device", "3 devices". @param {number} count  @param {string} one  @param {string} [many] */
export const counted = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** "a", "a and b", "a, b and c". @param {string[]} words */
export const listed = (words) =>
  words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words[words.length - 1]}`;

/** A sentence begins with a capital. @param {string} text */
export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
