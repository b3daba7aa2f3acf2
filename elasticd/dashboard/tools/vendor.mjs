// Makes static/vendor (Lit and uPlot, each one minified ES module) and the tests' axe, from the lock beside this file:
//
//     npm ci && npm run vendor
//
// The files are committed, so that neither a user nor the CI needs node. vendor.json has each file's SHA-256 and
// where it comes from; tests/dashboard/test_vendor.py compares.

import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const HERE = dirname(fileURLToPath(import.meta.url));
const ROOT = join(HERE, "../../..");
const VENDOR = join(HERE, "../static/vendor");
const TESTS = join(ROOT, "tests/dashboard/browser/vendor");
const MODULES = join(HERE, "node_modules");

/** What the pages use of Lit. One module, since each copy of Lit would ask for a Trusted Types policy of its own. */
const LIT = `
export { LitElement, html, svg, nothing, noChange, render } from "lit";
export { repeat } from "lit/directives/repeat.js";
export { guard } from "lit/directives/guard.js";
export { keyed } from "lit/directives/keyed.js";
export { live } from "lit/directives/live.js";
`;

const version = (name) => JSON.parse(readFileSync(join(MODULES, name, "package.json"))).version;

async function module(name, source, packages) {
  const licences = packages.map((one) => `${one} ${version(one)}`).join(", ");
  await build({
    stdin: { contents: source, resolveDir: HERE, loader: "js" },
    outfile: join(VENDOR, `${name}.js`),
    bundle: true,
    minify: true,
    format: "esm",
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    conditions: ["production"],
    banner: {
      js: `// @ts-nocheck\n/* ${licences}. Licences: LICENCES.txt. Made by elasticd/dashboard/tools/vendor.mjs. */`,
    },
  });
}

mkdirSync(VENDOR, { recursive: true });
mkdirSync(TESTS, { recursive: true });
const lit = ["lit", "lit-html", "lit-element", "@lit/reactive-element"];
await module("lit", LIT, lit);
await module("uplot", 'export { default } from "uplot";', ["uplot"]);
cpSync(join(MODULES, "uplot/dist/uPlot.min.css"), join(VENDOR, "uplot.css"));
cpSync(join(MODULES, "axe-core/axe.min.js"), join(TESTS, "axe.min.js"));
cpSync(join(MODULES, "axe-core/LICENSE"), join(TESTS, "axe.LICENSE"));
const texts = [...lit, "uplot"].map((name) => {
  const text = readFileSync(join(MODULES, name, "LICENSE"), "utf8").trim();
  return `${name} ${version(name)}\n${"=".repeat(name.length + version(name).length + 1)}\n\n${text}\n`;
});
writeFileSync(join(VENDOR, "LICENCES.txt"), texts.join("\n\n"));

const made = [
  ...["lit.js", "uplot.js", "uplot.css", "LICENCES.txt"].map((name) => join(VENDOR, name)),
  ...["axe.min.js", "axe.LICENSE"].map((name) => join(TESTS, name)),
];
const files = Object.fromEntries(
  made.map((path) => [relative(ROOT, path), createHash("sha256").update(readFileSync(path)).digest("hex")]),
);
const packages = Object.fromEntries([...lit, "uplot", "axe-core"].map((name) => [name, version(name)]));
writeFileSync(join(HERE, "vendor.json"), JSON.stringify({ packages, files }, null, 2) + "\n");
console.log(readFileSync(join(HERE, "vendor.json"), "utf8"));
