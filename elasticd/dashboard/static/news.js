// @ts-check
/** The one stream of news: the cluster as it is now, kept up to date, and each thing that happens as an event
 * of the DOM. Pages listen; none of them polls. */

import { get, recording } from "./source.js";
/** @import { ClusterView, DeviceCell, LiveDevices, LiveLeader } from "../tools/api.d.ts" */
/** @import { LivePlan, LiveStep, NodeRow } from "../tools/api.d.ts" */

/** Milliseconds without a pulse after which the stream counts as silent: pulses come every second. */
const SILENT = 3500;
/** Milliseconds until the stream is opened anew. */
const AGAIN = 1000;

/**
 * What listeners hear: "change" (`cluster` or the connection changed), "hello" (everything anew: ask again),
 * and with a value as `detail` "step", "event", "plan" and "progress".
 */
class News extends EventTarget {
  constructor() {
    super();
    /** @type {ClusterView | null} */ this.cluster = null;
    /** @type {"opening" | "open" | "lost"} */ this.connection = "opening";
    /** When the last word came, by the clock of this page, in milliseconds. */
    this.heardAt = 0;
    /** @type {EventSource | null} */ this.stream = null;
    /** @type {number} */ this.again = 0;
    /** @type {Map<string, [number, number]>} Where a device stands: index of its node, and of itself. */
    this.places = new Map();
  }

  /** The dashboard's clock, in unix seconds. */
  now() {
    if (recording) return this.cluster?.now ?? 0;
    return (
      (this.cluster?.now ?? Date.now() / 1e3) + (this.heardAt ? (performance.now() - this.heardAt) / 1e3 : 0)
    );
  }

  /** Seconds since anything was heard of the leader. */
  age() {
    return this.cluster?.heard ? Math.max(0, this.now() - this.cluster.heard) : null;
  }

  /** Seconds since the server said anything, where it is late; null where it is not. */
  silence() {
    if (recording || !this.heardAt) return null;
    const since = performance.now() - this.heardAt;
    return since > SILENT ? since / 1e3 : null;
  }

  async start() {
    if (recording) {
      this.greeted(await get("/api/cluster"));
      this.connection = "open";
      return;
    }
    this.open();
  }

  stop() {
    clearTimeout(this.again);
    this.stream?.close();
    this.stream = null;
  }

  open() {
    this.stop();
    const stream = new EventSource("/api/live");
    this.stream = stream;
    /** @param {string} name  @param {(value: any) => void} take */
    const on = (name, take) =>
      stream.addEventListener(name, (event) => {
        this.heardAt = performance.now();
        this.connection = "open";
        take(JSON.parse(/** @type {MessageEvent} */ (event).data));
      });
    on("hello", (value) => this.greeted(value));
    on("devices", (value) => this.devices(value));
    on("leader", (value) => this.leader(value));
    on("plan", (value) => this.plan(value));
    on("step", (value) => this.step(value));
    on("event", (value) => this.tell("event", value));
    on("progress", (value) => this.tell("progress", value));
    stream.addEventListener("error", () => {
      if (this.connection !== "lost") {
        this.connection = "lost";
        this.tell("change");
      }
      if (stream.readyState === EventSource.CLOSED) {
        // The browser tries again by itself only where the connection broke, not where it was refused.
        get("/api/viewer").then(
          (viewer) => {
            if (/** @type {import("../tools/api.d.ts").Viewer} */ (viewer).signed_in) this.later();
            else this.tell("signed-out");
          },
          () => this.later(),
        );
      }
    });
  }

  later() {
    clearTimeout(this.again);
    this.again = setTimeout(() => this.open(), AGAIN);
  }

  /** @param {string} name  @param {unknown} [detail] */
  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /** @param {ClusterView} value */
  greeted(value) {
    this.cluster = { ...value, nodes: value.nodes.map(whole) };
    this.placed();
    this.tell("change");
    this.tell("hello");
  }

  placed() {
    this.places.clear();
    this.cluster?.nodes.forEach((node, n) =>
      node.devices.forEach((cell, d) => this.places.set(cell.name, [n, d])),
    );
  }

  /** Rows that did not change stay the same objects, so that they are not drawn again.
   * @param {LiveDevices} value */
  devices(value) {
    if (!this.cluster) return;
    let nodes = this.cluster.nodes.slice();
    /** @type {Map<number, NodeRow>} */
    const fresh = new Map();
    for (const cell of value.devices) {
      const place = this.places.get(cell.name);
      if (!place) continue;
      const [n, d] = place;
      const row = fresh.get(n) ?? {
        ...nodes[n],
        devices: nodes[n].devices.slice(),
      };
      row.devices[d] = normal(cell);
      fresh.set(n, row);
    }
    for (const [n, row] of fresh) nodes[n] = row;
    if (value.nodes.length || value.gone.length) {
      const gone = new Set([...value.gone, ...value.nodes.map((node) => node.node)]);
      nodes = [...nodes.filter((node) => !gone.has(node.node)), ...value.nodes.map(whole)];
      nodes.sort((a, b) => (a.node < b.node ? -1 : a.node > b.node ? 1 : 0));
    }
    this.cluster = {
      ...this.cluster,
      nodes,
      counts: value.counts,
      heard: value.heard,
      abnormal: value.abnormal ?? this.cluster.abnormal,
    };
    if (value.nodes.length || value.gone.length) this.placed();
    this.tell("change");
    this.tell("devices", value);
  }

  /** @param {LiveLeader} value */
  leader(value) {
    if (this.cluster) this.cluster = { ...this.cluster, ...value };
    this.tell("change");
  }

  /** @param {LivePlan} value */
  plan(value) {
    if (this.cluster) {
      const others = this.cluster.jobs.filter((job) => job.job !== value.row.job);
      const place = this.cluster.jobs.findIndex((job) => job.job === value.row.job);
      const jobs = this.cluster.jobs.slice();
      if (place >= 0) jobs[place] = value.row;
      this.cluster = {
        ...this.cluster,
        jobs: value.gone ? others : place >= 0 ? jobs : [...others, value.row],
      };
    }
    this.tell("change");
    this.tell("plan", value);
  }

  /** @param {LiveStep} value */
  step(value) {
    if (this.cluster) {
      this.cluster = {
        ...this.cluster,
        jobs: this.cluster.jobs.map((job) => (job.job === value.job ? value.head : job)),
      };
    }
    this.tell("change");
    this.tell("step", value);
  }
}

/** A cell with all its fields. @param {DeviceCell} cell @returns {Required<DeviceCell>} */
const normal = (cell) => ({
  slowdown: 1,
  state: "healthy",
  job: "",
  place: null,
  pace: 1,
  ...cell,
});

/** @param {NodeRow} node */
const whole = (node) => ({ ...node, devices: node.devices.map(normal) });

export const news = new News();
