// Each scenario is a function that sends requests; the page shows them and the ledger as they come.
"use strict";
const random = () => Math.random().toString(36).slice(2, 10);
const customer = `visitor-${random()}`;
const charge = (more) => ({ amount: 1000, currency: "eur", customer, ...more });
const $ = (id) => document.getElementById(id);
let lastKey = null;

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const say = (text) => ($("summary").textContent = text);
const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, seconds * 1000));

function note(request, answer, kind) {
  const item = element("li", "", kind);
  item.append(element("span", answer, "tag"), element("code", request));
  $("log").prepend(item);
  while ($("log").children.length > 80) $("log").lastChild.remove();
}

async function send(path, key, body, { headers = {}, quiet = false } = {}) {
  const request = `POST /${path}  Idempotency-Key: "${key}"  ${JSON.stringify(body)}`;
  try {
    const response = await fetch(`/${path}`, {
      method: "POST",
      headers: {
        Authorization: "Bearer playground",
        "Content-Type": "application/json",
        "Idempotency-Key": `"${key}"`,
        ...headers,
      },
      body: JSON.stringify(body),
    });
    const content = await response.json();
    const replayed = response.headers.get("Idempotent-Replayed") === "true";
    const told = content.title || content.id || "";
    const kind = response.status < 300 ? "good" : response.status < 500 ? "warn" : "bad";
    if (!quiet) note(request, `${response.status}${replayed ? ", replayed" : ""}  ${told}`, kind);
    return { status: response.status, replayed, wait: Number(response.headers.get("Retry-After")) || 1 };
  } catch {
    if (!quiet) note(request, "No answer: the server has died.", "bad");
    return { status: 0, replayed: false, wait: 1 };
  }
}

async function refreshLedger() {
  const response = await fetch(`/effects?customer=${customer}`);
  const entries = await response.json();
  const rows = entries.map((entry, index) => {
    const row = document.createElement("tr");
    const values = [index + 1, entry.operation, entry.key, entry.attempt, entry.asked, entry.executed_at];
    row.append(...values.map((value) => element("td", String(value))));
    return row;
  });
  if (rows.length) $("ledger").replaceChildren(...rows.reverse());
  return entries.length;
}

async function restarted() {
  for (let tries = 0; tries < 120; tries += 1) {
    await sleep(0.5);
    try {
      if ((await fetch("/idempotency-policy", { cache: "no-store" })).ok) return;
    } catch {
      // Not yet.
    }
  }
  throw new Error("the demo did not start again: start it in the terminal, then press the button again");
}

// Sends again what nobody answered, as a client should: same key, same request.
async function untilDone(path, key, body) {
  for (;;) {
    const answer = await send(path, key, body);
    if (answer.status !== 409 && answer.status !== 0 && answer.status !== 503) return answer;
    say(`The dead attempt's lease still holds. Trying again in ${answer.wait} s.`);
    await sleep(answer.wait);
  }
}

const dying = { headers: { "X-Restart-After-Crash": "1" } };

const scenarios = [
  ["First call", "A charge with a new key.", async () => {
    lastKey = `first-${random()}`;
    const answer = await send("charges", lastKey, charge());
    return `Answered ${answer.status}. The charge was made.`;
  }],
  ["Retry it", "The same key and request: the client did not hear the answer.", async () => {
    lastKey = lastKey || `first-${random()}`;
    const answer = await send("charges", lastKey, charge());
    return answer.replayed ? "Replayed: the same answer, and nothing was charged again." : "This was the first call. Press again.";
  }],
  ["Reuse the key for something else", "The same key, another amount.", async () => {
    if (!lastKey) await send("charges", (lastKey = `first-${random()}`), charge());
    const answer = await send("charges", lastKey, charge({ amount: 9999 }));
    return `Refused with ${answer.status}: nobody gets the answer to another question.`;
  }],
  ["Fifty at once", "Fifty copies of one request, all at the same moment.", async () => {
    const key = `fifty-${random()}`;
    const before = await refreshLedger();
    const all = await Promise.all(Array.from({ length: 50 }, () => send("charges", key, charge(), { quiet: true })));
    const counts = {};
    for (const { status, replayed } of all) {
      const name = replayed ? `${status} replayed` : String(status);
      counts[name] = (counts[name] || 0) + 1;
    }
    const text = Object.entries(counts).map(([name, count]) => `${count} × ${name}`).join(", ");
    note(`50 × POST /charges  Idempotency-Key: "${key}"`, text, "good");
    const made = (await refreshLedger()) - before;
    return `Fifty requests, ${made} charge. The others were replayed, or told to come back (409).`;
  }],
  ["Wait for a slow one", "A charge that takes three seconds, and a retry with Prefer: wait=10.", async () => {
    const key = `slow-${random()}`;
    const first = send("charges", key, charge({ delay_ms: 3000 }));
    await sleep(0.3);
    say("The first is at work. The retry waits for its outcome.");
    const [, second] = await Promise.all([first, send("charges", key, charge(), { headers: { Prefer: "wait=10" } })]);
    return second.replayed ? "The retry waited and got the first one's answer." : `The retry was answered ${second.status}.`;
  }],
  ["Crash in the middle", "The server dies while it charges. It starts again by itself.", async () => {
    const key = `crash-${random()}`;
    await send("charges", key, charge({ outcome: "crash" }), dying);
    say("The server has died. Waiting until it is back.");
    await restarted();
    const answer = await untilDone("charges", key, charge());
    return `Answered ${answer.status} after the crash, by attempt 2: charged once.`;
  }],
  ["Die between two steps", "A checkout that dies after it has charged. The retry goes on from there.", async () => {
    const key = `checkout-${random()}`;
    const body = { customer, items: ["widget", "gadget"] };
    await send("checkouts", key, { ...body, crash_after: "charge" }, dying);
    say("The server has died after the step “charge”. Waiting until it is back.");
    await restarted();
    const answer = await untilDone("checkouts", key, body);
    await sleep(1);
    return `Answered ${answer.status}: one reservation, one charge, one receipt. See the executions below.`;
  }],
];

const buttons = [];
for (const [title, what, run] of scenarios) {
  const item = document.createElement("li");
  const button = element("button", "Run");
  button.setAttribute("aria-label", `Run: ${title}`);
  button.addEventListener("click", async () => {
    for (const each of buttons) each.disabled = true;
    say(`${title} …`);
    try {
      const told = await run();
      await refreshLedger();
      say(told);
    } catch (error) {
      say(String(error.message || error));
    } finally {
      for (const each of buttons) each.disabled = false;
      button.focus();
    }
  });
  buttons.push(button);
  item.append(element("b", title), button, element("p", what));
  $("scenarios").append(item);
}
