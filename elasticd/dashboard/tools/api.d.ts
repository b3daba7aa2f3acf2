// Written by docs/draw.py from elasticd/dashboard/views.py. Do not edit.
// `optional?`: left out where it has its default value.

/** Why a request is not carried out. */
export interface PageRefusal {
  error: string;
}

/** The body of `POST /session`. */
export interface SignIn {
  token: string;
}

/** The person at the browser. */
export interface Viewer {
  signed_in: boolean;
  asks: boolean;
  name: string;
  role: "viewer" | "operator" | "";
}

/** The leader, and whether the dashboard hears it. */
export interface LeaderView {
  name: string;
  url: string;
  epoch: number;
  reachable: boolean;
  since: number;
  trouble: string;
}

/** etcd as the leader sees it; as the dashboard does while it looks for a leader. */
export interface EtcdView {
  reachable: boolean;
  since: number;
  unwritten_seconds: number;
}

/** Something that happened, as `elasticd logs` has it. */
export interface EventRow {
  id: number;
  time: number;
  kind: string;
  job: string;
  text: string;
  data: Record<string, any>;
  node: string;
  device: string;
  by: string;
}

/** A moment on a time axis: a plan, a fault, a snapshot, a checkpoint. */
export interface TimeMark {
  time: number;
  step: number | null;
  kind: "plan" | "fault" | "slow" | "snapshot" | "checkpoint" | "change";
  text: string;
  event: number;
}

/** A device of the heat map. */
export interface DeviceCell {
  name: string;
  slowdown?: number;
  state?: "unreachable" | "hung" | "drained" | "draining" | "slow" | "standby" | "state" | "unused" | "healthy";
  job?: string;
  place?: [number, number, number, number, number] | null;
  pace?: number;
}

/** A row of the heat map. */
export interface NodeRow {
  node: string;
  connected: boolean;
  draining: boolean;
  members: number;
  address: string;
  emulated: boolean;
  devices: DeviceCell[];
}

/** A row of the table "not normal": the accessible twin of the heat map. */
export interface Abnormal {
  what: "device" | "node" | "link" | "job";
  name: string;
  state: string;
  slowdown: number | null;
  why: string;
  since: number | null;
  job: string;
}

/** A row of the table of jobs, and the head of a job's page. */
export interface JobRow {
  job: string;
  phase: string;
  sentence: string;
  step: number | null;
  loss: number | null;
  tokens_per_second: number | null;
  within_steps: number | null;
  predicted: number | null;
  bound: number | null;
  plan: number | null;
  proposal: number | null;
  devices: number;
  standby: number;
  ettr: number | null;
  goodput: number | null;
  last_event: EventRow | null;
}

/** A link between two nodes that is slow. */
export interface LinkRow {
  link: string;
  slowdown: number;
  bandwidth: number;
  latency: number;
}

/** `/`: is everything all right, and if not, what is wrong? */
export interface ClusterView {
  cluster: string;
  leader: LeaderView;
  etcd: EtcdView;
  paused: boolean;
  heard: number;
  now: number;
  viewer: Viewer;
  nodes: NodeRow[];
  counts: Record<string, number>;
  abnormal: Abnormal[];
  jobs: JobRow[];
  links: LinkRow[];
}

/** A stage of a pipeline in the newest step, as its slowest device measured it. */
export interface StageParts {
  module: string;
  pipeline: number;
  lane: number;
  stage: number;
  layers: string;
  devices: string[];
  slowest: string;
  seconds: Record<string, number>;
  total: number;
}

/** Wall time that no step of the surviving history took. */
export interface LostTime {
  cause: string;
  seconds: number;
  times: number;
}

/** A worker process. */
export interface MemberRow {
  device: string;
  node: string;
  pid: number;
  computes_on: string;
  transport: string;
  rank: number | null;
  role: "computes" | "state" | "standby";
  hung: string;
}

/** A snapshot in memory or a checkpoint on disk. */
export interface Kept {
  kind: "snapshot" | "checkpoint";
  step: number;
  time: number;
  name: string;
}

/** A lane of a pipeline: how much slower than the others it is, and its share of the tokens. */
export interface LaneRow {
  pipeline: number;
  lane: number;
  devices: string[];
  slowdown: number;
  rows: number;
}

/** The experts of a block on a group of devices that compute for each other. */
export interface ExpertBlock {
  block: number;
  holders: number[][];
  busiest: number;
  over: number;
}

/** Devices that compute for each other: a TP group, or the lanes of a stage that share experts. */
export interface ExpertGroup {
  pipeline: number;
  lane: number | null;
  stage: number;
  devices: string[];
  blocks: ExpertBlock[];
}

/** The load of experts, in the mean of the last reports, and the devices that have them. */
export interface ExpertsView {
  parts: Record<number, number[]>;
  groups: ExpertGroup[];
}

/** Sequence lengths of the newest step. */
export interface LengthsView {
  mean: number | null;
  shortest: number | null;
  longest: number | null;
  now: [number, number, number][];
}

/** The batch of a step. */
export interface BatchView {
  samples: number;
  micro_batch: number;
  by_pipeline: number[];
  sequences: number | null;
  tokens: number | null;
  cut: number | null;
  imbalance: number | null;
}

/** An exception of the script's own code. */
export interface ExceptionView {
  device: string;
  step: number;
  kind: string;
  message: string;
  traceback: string;
}

/** A device of a job in restart mode. */
export interface RestartDevice {
  device: string;
  seconds: number | null;
  ratio: number | null;
}

/** A job in restart mode. */
export interface RestartView {
  nodes: string[];
  workers: number;
  restarts: number;
  round: number | null;
  step_seconds: number | null;
  devices: RestartDevice[];
  out: Record<string, string>;
  failure: string;
}

/** `/jobs/JOB`: how fast does it train, how fast could it, and where did the rest go? */
export interface JobView {
  head: JobRow;
  heard: number;
  measured_step: number | null;
  stages: StageParts[];
  wall_seconds: number;
  productive_seconds: number;
  healthy_seconds: number | null;
  lost: LostTime[];
  slowness_seconds: number | null;
  repeated_steps: number;
  lanes: LaneRow[];
  experts: ExpertsView | null;
  lengths: LengthsView | null;
  batch: BatchView | null;
  members: MemberRow[];
  kept: Kept[];
  exception: ExceptionView | null;
  restart: RestartView | null;
}

/** `/api/jobs/JOB/steps`: columns of the same length, oldest first. At most 4,000 steps: of more, every */
export interface StepColumns {
  job: string;
  every: number;
  step: number[];
  time: number[];
  plan: number[];
  seconds: number[];
  tokens_per_second: (number | null)[];
  within_steps: (number | null)[];
  predicted: (number | null)[];
  bound: (number | null)[];
  loss: (number | null)[];
  marks: TimeMark[];
}

/** A plan in the list of a job's plans. */
export interface PlanRow {
  number: number;
  time: number | null;
  reason: string;
  outcome: "in force" | "replaced" | "proposed" | "aborted" | "unknown";
  predicted_seconds: number | null;
  first_predicted_seconds: number | null;
  guessed: boolean;
  measured_seconds: number | null;
  steps: number;
  pause_seconds: number | null;
  bytes_sent: number | null;
}

/** `/api/jobs/JOB/plans`, newest first. */
export interface PlanList {
  job: string;
  plans: PlanRow[];
}

/** A stage in the picture of a plan: a box as wide as its layers. */
export interface StageBox {
  stage: number;
  layers: number;
  named: string;
  devices: string[];
  slowdowns: number[];
  shares: number[];
  load: number;
  recompute: boolean;
}

/** A lane of a pipeline in the picture of a plan. */
export interface PipelineBox {
  module: string;
  pipeline: number;
  lane: number;
  micro_batches: number;
  seconds: number | null;
  stages: StageBox[];
  items: string;
}

/** One pass of a stage in the predicted 1F1B schedule. */
export interface TimelinePass {
  kind: "forward" | "backward";
  micro_batch: number;
  chunk: number;
  start: number;
  stop: number;
}

/** The predicted 1F1B schedule of one lane of a pipeline. */
export interface TimelineLane {
  module: string;
  pipeline: number;
  lane: number;
  alike: number;
  seconds: number;
  stages: TimelinePass[][];
  shortened: boolean;
}

/** A device in the difference of two plans. */
export interface Moving {
  device: string;
  before: string;
  after: string;
  bytes_lacking: number;
}

/** The difference to the plan before. */
export interface PlanDiff {
  before: number;
  devices: Moving[];
  bytes_lacking: number;
  bytes_state: number;
  bytes_sent: number | null;
  ratio: number | null;
}

/** The policy's inequality: a plan is worth its switch if saving > price. */
export interface Policy {
  current_seconds: number | null;
  new_seconds: number | null;
  price_seconds: number | null;
  steps: number | null;
  saving_seconds: number | null;
  text: string;
}

/** Operations of one purpose in a step, by `elasticd plan --explain`'s rules. */
export interface Communication {
  purpose: string;
  operation: string;
  groups: number;
  devices: string[];
  times: number;
  bytes: Record<string, number>;
  seconds: number | null;
}

/** `/jobs/JOB/plans/NUMBER`: what is this plan, why was it chosen, and what did it bring? */
export interface PlanView {
  row: PlanRow;
  newest: number;
  numbers: number[];
  pipelines: PipelineBox[];
  idle: string[];
  carriers: string[];
  timeline: TimelineLane[];
  timeline_seconds: number | null;
  why: string;
  policy: Policy | null;
  diff: PlanDiff | null;
  communications: Communication[];
  communications_missing: string;
}

/** A rank in a switch. Seconds count from the proposal; null: not yet, or not heard. */
export interface RankProgress {
  device: string;
  rank: number;
  prepared: number | null;
  moved: number | null;
  pause: number | null;
  bytes_sent: number | null;
  bytes_lacking: number | null;
  kept: boolean;
}

/** Bytes that went from node to node in a switch. */
export interface Transfer {
  source: string;
  target: string;
  bytes: number;
}

/** `/jobs/JOB/switch`: how far is the switch, and whom does it wait for? */
export interface SwitchView {
  job: string;
  number: number;
  phase: "none" | "preparing" | "voting" | "moving" | "done" | "aborted";
  sentence: string;
  proposed: number | null;
  recorded: number | null;
  step: number | null;
  pause: number | null;
  recovery: boolean;
  ranks: RankProgress[];
  links: Transfer[];
  events: EventRow[];
}

/** A moment in a job. */
export interface JobMoment {
  job: string;
  step: number | null;
  time: number;
}

/** An episode: a time in which the device was slow in one run of a job. */
export interface SlowTime {
  start: JobMoment;
  stop: JobMoment | null;
  now: boolean;
  slowdown: number;
}

/** A device's slowdown over time, columns of the same length, oldest first. Each value holds until the next */
export interface SlowdownColumns {
  time: number[];
  step: number[];
  measured: (number | null)[];
  decided: (number | null)[];
  cusum: (number | null)[];
}

/** By which detection judges, as configured now. */
export interface Thresholds {
  slow: number;
  recovered: number;
  min_steps: number;
  false_alarms: number;
  cusum: number | null;
}

/** The readings of the node's agent about the device: columns of the same length, oldest first; null at a */
export interface HealthColumns {
  time: number[];
  values: Record<string, (number | null)[]>;
  units: Record<string, string>;
}

/** A worker's main thread that stands still, or stood still last. */
export interface Hang {
  now: boolean;
  time: number;
  step: number;
  place: string;
  stack: string;
}

/** `/devices/NODE/RANK`: is this device the culprit, and why? */
export interface DeviceView {
  cell: DeviceCell;
  node: string;
  memory: number;
  connected: boolean;
  draining: boolean;
  use: string;
  kind: string;
  kind_reason: string;
  causes: string[];
  thresholds: Thresholds | null;
  slowdown: SlowdownColumns;
  episodes: SlowTime[];
  parts: Record<string, number>;
  health: HealthColumns;
  throttled: string[];
  xids: number[];
  plans: [number, number, string][];
  hang: Hang | null;
  events: EventRow[];
}

/** Events that belong together: from a cause to the plan that answers it. */
export interface EventGroup {
  title: string;
  job: string;
  plan: number | null;
  start: number;
  stop: number;
  durations: Record<string, number>;
  events: EventRow[];
}

/** `/events`: what happened, in which order? Newest first. */
export interface EventPage {
  events: EventRow[];
  groups: EventGroup[];
  before: number | null;
  kinds: string[];
  jobs: string[];
  nodes: string[];
  oldest: number | null;
}

/** A key of detection or policy. */
export interface ConfigValue {
  key: string;
  value: boolean | number | string;
  changed: boolean;
}

/** A change while running. */
export interface ConfigChange {
  number: number;
  time: number;
  by: string;
  set: Record<string, boolean | number | string>;
  unset: string[];
}

/** `/api/config`. */
export interface ConfigView {
  values: ConfigValue[];
  history: ConfigChange[];
}

/** Something that can be asked of the leader. */
export interface Act {
  name: string;
  words: string;
  command: string;
  fields: string[];
  allowed: boolean;
  why_not: string;
  confirm: string;
  choices: Record<string, string[]>;
}

/** `/api/act`: what can be done, and how from a shell? */
export interface ActList {
  viewer: Viewer;
  acts: Act[];
}

/** A part of what a device's worker wrote. */
export interface OutputView {
  device: string;
  job: string;
  begin: number;
  end: number;
  text: string;
}

/** The answer to `POST /api/act/NAME`. */
export interface Acted {
  name: string;
  command: string;
  answer: any;
}

/** Devices and nodes that changed since the last such event. */
export interface LiveDevices {
  devices: DeviceCell[];
  nodes: NodeRow[];
  gone: string[];
  counts: Record<string, number>;
  abnormal: Abnormal[] | null;
  heard: number;
}

/** The newest step of a job; of several within a second the last. */
export interface LiveStep {
  job: string;
  step: number;
  time: number;
  plan: number;
  seconds: number;
  tokens_per_second: number | null;
  within_steps: number | null;
  predicted: number | null;
  bound: number | null;
  loss: number | null;
  head: JobRow;
  measured_step: number | null;
  stages: StageParts[];
}

/** A job's row changed otherwise than by a step. With another plan or place of devices, `devices` events */
export interface LivePlan {
  row: JobRow;
  over: boolean;
  gone: boolean;
}

/** The leader, the reachability of all, and the slow links. */
export interface LiveLeader {
  leader: LeaderView;
  etcd: EtcdView;
  paused: boolean;
  links: LinkRow[];
  heard: number;
  now: number;
}
