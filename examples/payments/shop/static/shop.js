// The client's side of the story: one key for each payment, kept until there is an answer, and sent on every retry.

const BODY = JSON.stringify({ amount: 4200, currency: "EUR", card: "card-4242" });
const ATTEMPTS = 5;
const PAUSE = 1200; // milliseconds before a retry: long enough to read what has happened
const PATIENCE = 15000; // milliseconds after which no answer is expected any more
const ASK_AGAIN = [409, 429, 503]; // with Retry-After, they ask for the same request later

const part = (id) => document.getElementById(id);
const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const money = (cents) => `${(cents / 100).toFixed(2)} EUR`;

// What has to outlive a reload: whose ledger it is, which payment each charge is for, and the payment without an answer.
const FRESH = { token: null, payments: 0, charges: {}, pending: null };
let visit = JSON.parse(sessionStorage.getItem("visit")) ?? structuredClone(FRESH);
let busy = false;

function remember() {
  sessionStorage.setItem("visit", JSON.stringify(visit));
}

function newKey() {
  // Not randomUUID(): a browser has it on https and on this machine only.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${visit.token}`, ...options.headers };
  return fetch(path, { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
}

function say(text, kind) {
  const line = document.createElement("li");
  line.className = kind;
  line.textContent = text;
  part("messages").append(line);
  part("log").scrollTop = part("log").scrollHeight;
}

function judge(text, kind) {
  part("verdict").textContent = text;
  part("verdict").dataset.kind = kind;
}

async function showLedger() {
  const answer = await ask("/charges");
  if (answer.status === 401) return beginVisit(); // the shop was opened anew, with another ledger
  if (!answer.ok) throw new TypeError(`the ledger answered ${answer.status}`);
  const { charges } = await answer.json();
  for (const charge of charges) visit.charges[charge.id] ??= visit.payments;
  remember();
  const seen = new Set();
  part("charges").replaceChildren(...charges.map((charge) => ledgerRow(charge, seen)));
  part("count").textContent = charges.length
    ? `${count(visit.payments, "payment")}, ${count(charges.length, "charge")}`
    : "No charge yet";
  part("total").textContent = money(charges.reduce((sum, charge) => sum + charge.amount, 0));
}

function count(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

function ledgerRow(charge, seen) {
  const row = document.createElement("tr");
  const payment = visit.charges[charge.id];
  const again = seen.has(payment);
  seen.add(payment);
  row.className = again ? "again" : "";
  for (const text of [`no. ${charge.id}`, `payment ${payment}${again ? ", again" : ""}`, money(charge.amount)]) {
    row.insertCell().textContent = text;
  }
  row.lastChild.className = "amount";
  return row;
}

async function send(payment) {
  const headers = { "Content-Type": "application/json", "Idempotency-Key": payment.key };
  const lose = part("lose").checked;
  if (lose) headers["Lose-Answer"] = "true";
  part("lose").checked = false;
  say(`→ POST ${payment.path}, Idempotency-Key: ${payment.key}`, "out");
  try {
    const response = await ask(payment.path, { method: "POST", body: BODY, headers });
    return { response, body: await response.json() };
  } catch (error) {
    say(`← nothing (${error.message}). Was the card charged? The page can't know.`, "back nothing");
    return null;
  }
}

async function carryOut(payment) {
  for (let attempt = 1; attempt <= ATTEMPTS; attempt++) {
    judge(attempt === 1 ? "Paying …" : "No answer yet: the same request again, with the same key …", "");
    const answer = await send(payment);
    let pause = PAUSE;
    if (answer) {
      const { response, body } = answer;
      const replay = response.headers.get("Idempotent-Replay") === "true";
      const what = response.ok ? `charge no. ${body.id}` : body.detail;
      say(`← ${response.status}${replay ? ", Idempotent-Replay: true" : ""}: ${what}`, "back");
      const retryAfter = Number(response.headers.get("Retry-After"));
      if (!retryAfter || !ASK_AGAIN.includes(response.status)) return { ok: response.ok, replay, body };
      pause = retryAfter * 1000;
    }
    await showLedger();
    await wait(pause);
  }
  return null;
}

function conclude(answer) {
  const charged = Object.values(visit.charges).filter((payment) => payment === visit.payments).length;
  if (!answer) {
    judge("No answer. The key is kept: “Try again” sends the same payment, not another one.", "bad");
  } else if (!answer.ok) {
    judge(`Not charged: ${answer.body.detail}`, "bad");
  } else if (charged > 1) {
    judge(`Charged ${charged === 2 ? "twice" : `${charged} times`}: nothing guarded the route, so the view ran again.`, "bad");
  } else if (answer.replay) {
    judge("Charged once: the retry got the recorded answer, and the view did not run again.", "good");
  } else {
    judge("Charged once.", "good");
  }
}

function settle(answer) {
  if (answer) visit.pending = null;
  part("pay").textContent = visit.pending ? "Try again" : "Pay 42.00 EUR";
  remember();
}

async function pay() {
  if (!visit.pending) {
    visit.pending = { key: newKey(), path: part("guard").checked ? "/charges" : "/unguarded/charges" };
    visit.payments += 1;
    remember();
  }
  const answer = await carryOut(visit.pending);
  settle(answer);
  await showLedger();
  conclude(answer);
}

async function beginVisit() {
  const response = await ask("/visits", { method: "POST" });
  visit = { ...structuredClone(FRESH), token: (await response.json()).token };
  part("messages").replaceChildren();
  judge("", "");
  settle(null);
  await showLedger();
}

// One thing at a time. The button keeps the focus: a disabled one would lose it for those who use the keyboard.
function alone(action) {
  return async () => {
    if (busy) return;
    busy = true;
    for (const id of ["pay", "again"]) part(id).setAttribute("aria-disabled", "true");
    try {
      await action();
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof DOMException)) throw error;
      settle(null);
      judge(`The shop does not answer (${error.message}).`, "bad");
    } finally {
      busy = false;
      for (const id of ["pay", "again"]) part(id).removeAttribute("aria-disabled");
    }
  };
}

part("pay").addEventListener("click", alone(pay));
part("again").addEventListener("click", alone(beginVisit));
alone(async () => {
  if (!visit.token) return beginVisit();
  settle(null);
  return showLedger();
})();
