// @ts-check
/** Where the pages' values come from: the dashboard's server, or, in a report, the file itself. */

/** A request that was not answered with a value; its text says why, and what would be right. */
export class Refused extends Error {
  /** @param {number} status  0 where there was no answer  @param {string} text */
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Values by path, in a report. @type {Record<string, unknown> | null} */
export const recording = (() => {
  const kept = document.getElementById("recording");
  return kept ? JSON.parse(kept.textContent ?? "{}") : null;
})();

/** Told where the session is over. */
export const session = new EventTarget();

/**
 * @template T
 * @param {string} path  as "/api/cluster"
 * @returns {Promise<T>}
 */
export async function get(path) {
  if (recording) {
    if (path in recording) return /** @type {T} */ (recording[path]);
    throw new Refused(404, "the report does not have this");
  }
  return /** @type {T} */ (await asked("GET", path));
}

/**
 * @param {string} method
 * @param {string} path
 * @param {unknown} [body]
 * @returns {Promise<unknown>}
 */
export async function asked(method, path, body) {
  if (recording) throw new Refused(0, "a report has no server to ask");
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: body === undefined ? {} : { "Content-Type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
    });
  } catch {
    throw new Refused(0, "the dashboard's server does not answer");
  }
  const text = await answer.text();
  if (answer.ok) return text ? JSON.parse(text) : null;
  if (answer.status === 401) session.dispatchEvent(new Event("over"));
  throw new Refused(answer.status, reason(text) || `the server answered ${answer.status}`);
}

/** @param {string} text */
function reason(text) {
  try {
    const said = JSON.parse(text).error;
    return typeof said === "string" ? said : "";
  } catch {
    return text.slice(0, 300);
  }
}

// -- addresses ---------------------------------------------------------------------------------------------

/** A name as a part of a path. @param {string} name */
export const part = (name) => encodeURIComponent(name);

/** The page that is shown, as "/jobs/my-job?x=1". A report keeps it behind the #. */
export const here = () =>
  recording ? location.hash.slice(1) || String(recording.start ?? "/") : location.pathname + location.search;

/** How a link to a page is written. @param {string} path */
export const to = (path) => (recording ? `#${path}` : path);

export const deviceHref = (/** @type {string} */ device) => {
  const at = device.lastIndexOf("/");
  return to(`/devices/${part(device.slice(0, at))}/${part(device.slice(at + 1))}`);
};
export const jobHref = (/** @type {string} */ job) => to(`/jobs/${part(job)}`);
export const planHref = (/** @type {string} */ job, /** @type {number} */ plan) =>
  to(`/jobs/${part(job)}/plans/${plan}`);
