"use strict";
// Shows the state from the server, by server-sent events or else by polling every two seconds, and posts the actions of the buttons.

const POLL = 2000;
const RECONNECT = 10000;
const at = (id) => document.getElementById(id);
const timers = new Map(); // element -> when its wait is over, by the clock of this page
const rows = new Map(); // number of a document -> its elements
const workerRows = new Map();
let source = null;
let polling = null;
let lastLine = 0;
let run = null;

function make(tag, parent, attributes = {}, text = "") {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// -- the connection ---------------------------------------------------------------------------

function connected(text, lost) {
  write(at("connection"), text);
  at("connection").classList.toggle("lost", lost);
}

function listen() {
  source = new EventSource("events");
  source.onopen = () => {
    clearInterval(polling);
    polling = null;
    connected("Live", false);
  };
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onerror = () => {
    if (polling === null) {
      poll();
      polling = setInterval(poll, POLL);
    }
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, RECONNECT); // else it tries by itself
  };
}

async function poll() {
  try {
    const answer = await fetch("state");
    if (!answer.ok) throw new Error(answer.statusText);
    show(await answer.json());
    if (polling !== null) connected("No live connection: polls every 2 seconds", false);
  } catch {
    connected("Connection lost. The data are old; trying again every 2 seconds.", true);
  }
}

async function post(path, value = {}) {
  write(at("said"), "");
  try {
    const answer = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(value),
    });
    if (answer.ok) return;
    const type = answer.headers.get("Content-Type") || "";
    const why = type.includes("json") ? (await answer.json()).error : answer.statusText;
    write(at("said"), `Not possible: ${why}`);
  } catch {
    write(at("said"), "Not sent: the server does not answer.");
  }
}

// -- what is shown ----------------------------------------------------------------------------

function show(state) {
  at("problem").hidden = !state.problem;
  write(at("problem"), state.problem || "");
  if (!state.documents) return;
  if (run !== null && run !== state.run) location.reload(); // make play was restarted
  run = state.run;
  at("none").hidden = state.documents.length > 0;
  for (const one of state.documents) showDocument(one);
  for (const side of ["leases", "plain"]) showTotal(side, state.totals[side]);
  showGroup(state.group);
  for (const worker of state.workers) showWorker(worker);
  showProvider(state.provider);
  for (const line of state.log) if (line.id > lastLine) showLine(line);
  tick();
}

function showDocument(one) {
  const row = rows.get(one.number) || makeDocument(one.number);
  const { leases, plain } = one;
  write(row.presses, `pressed ${times(one.presses)}`);
  write(row.state, leases.message);
  row.item.dataset.state = leases.state;
  countdown(row.timer, leases.retry_after);
  write(row.why, why(leases));
  row.pages.hidden = leases.state !== "running" && leases.state !== "abandoned";
  row.pages.value = leases.pages;
  row.pages.max = one.pages;
  write(row.pagesText, row.pages.hidden ? "" : `page ${leases.pages} of ${one.pages}`);
  write(row.paid, `paid ${times(leases.paid)}`);
  row.now.hidden = !["cooling", "failed"].includes(leases.state);
  row.decide.hidden = leases.state !== "uncertain";
  write(row.evidence, leases.evidence || "");
  write(row.plain, ran(plain));
  write(row.plainPaid, `paid ${times(plain.paid)}`);
}

function why(leases) {
  const reasons = [];
  if (leases.scope === "group") reasons.push("its group is closed");
  else if (leases.reason) reasons.push(leases.reason.replaceAll("_", " "));
  if (leases.retry_after && leases.resumes) reasons.push("runs again by itself");
  if (leases.crashes) reasons.push(`crashed ${times(leases.crashes)}`);
  return reasons.length && leases.state !== "done" ? `(${reasons.join(", ")})` : "";
}

function ran(plain) {
  const parts = [];
  if (plain.open) parts.push(`${plain.open} pending`);
  if (plain.finished) parts.push(`${plain.finished} with a result`);
  if (plain.failed) parts.push(`${plain.failed} failed`);
  return parts.join(", ");
}

function makeDocument(number) {
  const name = `Document ${number}`;
  const item = make("li", at("list"), { "data-document": number });
  item.remove();
  at("list").prepend(item); // the latest first
  const row = { item };
  make("h3", item, { id: `document-${number}` }, name);
  item.append(" ");
  row.presses = make("small", item);
  // The buttons come first, so that they do not move between the clicks of a double click.
  const buttons = make("div", item);
  button(buttons, "Press again", `Press again: ${name}`, `documents/${number}/presses`, { times: 1 }, "again");
  button(buttons, "Press 10 times", `Press 10 times: ${name}`, `documents/${number}/presses`, { times: 10 }, "often");
  row.now = button(buttons, "Run now", `Run now: ${name}`, `documents/${number}/retry`, {}, "now");
  const sides = make("div", item, { class: "sides" });
  const leases = make("div", sides, { class: "side leases" });
  make("div", leases, {}, "With leases: ");
  row.state = make("span", leases, { class: "state" });
  leases.append(" ");
  row.timer = make("span", leases, { role: "timer", "aria-live": "off", "aria-label": `Wait of ${name}` });
  leases.append(" ");
  row.why = make("small", leases);
  const reading = make("div", leases);
  row.pages = make("progress", reading, { "aria-label": `Pages read of ${name}` });
  reading.append(" ");
  row.pagesText = make("small", reading);
  row.paid = make("div", leases, { class: "paid" });
  const plain = make("div", sides, { class: "side plain" });
  make("div", plain, {}, "Plain Celery: ");
  row.plain = make("span", plain, { class: "state" });
  row.plainPaid = make("div", plain, { class: "paid" });
  row.decide = make("div", item, { class: "decide", role: "group", "aria-label": `Decide about ${name}` });
  make("p", row.decide, {}, "It may have been charged. Decide:");
  row.evidence = make("p", row.decide);
  const path = `documents/${number}/resolution`;
  button(row.decide, "It was charged: done", "", path, { outcome: "done" }, "charged");
  button(row.decide, "It was not: run again", "", path, { outcome: "retry" }, "uncharged");
  rows.set(number, row);
  return row;
}

function button(parent, text, label, path, value, kind) {
  const made = make("button", parent, { type: "button", class: kind, ...(label && { "aria-label": label }) }, text);
  made.addEventListener("click", () => post(path, value));
  parent.append(" ");
  return made;
}

function showTotal(side, total) {
  write(at(`${side}-paid`), String(total.paid));
  write(at(`${side}-cents`), `$${(total.cents / 100).toFixed(2)}`);
  const refused = total.refused ? `, ${total.refused} of them refused` : "";
  write(at(`${side}-calls`), `${total.calls} ${total.calls === 1 ? "call" : "calls"}${refused}`);
}

function showGroup(group) {
  const reason = group.reason ? ` (${group.reason.replaceAll("_", " ")})` : "";
  write(at("group"), `The group is ${group.state.replace("_", " ")}${group.state === "open" ? "" : reason}.`);
  at("open-group").hidden = group.state === "open";
  countdown(at("group-timer"), group.retry_after);
}

function showWorker(worker) {
  let row = workerRows.get(worker.name);
  if (!row) {
    const item = make("li", at("workers"));
    row = { text: make("span", item) };
    item.append(" ");
    row.kill = button(item, "Kill it", `Kill ${worker.short}`, `workers/${encodeURIComponent(worker.name)}/death`, {}, "kill");
    workerRows.set(worker.name, row);
  }
  write(row.text, `${worker.short} ${worker.up ? "is running" : "was killed, and starts again"}`);
  row.kill.disabled = !worker.up;
}

function showLine(line) {
  const item = make("li", at("log"));
  make("time", item, {}, line.at);
  item.append(line.text);
  lastLine = line.id;
  while (at("log").children.length > 60) at("log").firstChild.remove();
  at("log").scrollTop = at("log").scrollHeight;
}

function times(number) {
  return ["never", "once", "twice"][number] || `${number} times`;
}

// -- countdowns: from the server's latest number ------------------

function countdown(element, seconds) {
  if (seconds) timers.set(element, performance.now() + seconds * 1000);
  else {
    timers.delete(element);
    write(element, "");
  }
}

function tick() {
  for (const [element, over] of timers) {
    const left = Math.max(0, Math.ceil((over - performance.now()) / 1000));
    write(element, `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")}`);
  }
}

// -- the provider -----------------------------------------------------------------------------

const sliders = { latency: ["latency", 1, "s"], error_rate: ["error-rate", 100, "%"], limit: ["limit", 1, "s"] };
const settings = { latency: 1, error_rate: 0, limit: 20, trouble: "none", tells: true };

function showProvider(provider) {
  for (const name of Object.keys(settings)) settings[name] = provider[name];
  for (const [name, [id, factor]] of Object.entries(sliders)) {
    if (document.activeElement !== at(id)) at(id).value = provider[name] * factor;
  }
  for (const radio of document.getElementsByName("trouble")) radio.checked = radio.value === provider.trouble;
  at("tells").checked = provider.tells;
  outputs();
  at("limited").hidden = !provider.limited_for;
  write(at("limited"), `It refuses calls for ${Math.ceil(provider.limited_for)} more seconds.`);
}

function outputs() {
  for (const [id, , unit] of Object.values(sliders)) write(at(`${id}-shown`), `${at(id).value} ${unit}`);
}

function configure(changes) {
  Object.assign(settings, changes);
  post("provider", settings);
}

for (const [name, [id, factor]] of Object.entries(sliders)) {
  at(id).addEventListener("input", outputs);
  at(id).addEventListener("change", () => configure({ [name]: Number(at(id).value) / factor }));
}
for (const radio of document.getElementsByName("trouble")) {
  radio.addEventListener("change", () => configure({ trouble: radio.value }));
}
at("tells").addEventListener("change", () => configure({ tells: at("tells").checked }));
at("submit").addEventListener("click", () => post("documents"));
at("open-group").addEventListener("click", () => post("group/opening"));
setInterval(tick, 250);
listen();
