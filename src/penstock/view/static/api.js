// Asks the server for a screen, or looks it up in the data of an exported page.
const embedded = document.getElementById("data");
const stored = embedded ? JSON.parse(embedded.textContent) : null;
export const exported = stored !== null;
const KEY = "penstock-token";

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const given = (params) => Object.entries(params || {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
const query = (params) => new URLSearchParams(given(params)).toString();

function headers() {
  const token = sessionStorage.getItem(KEY);
  return token ? { authorization: `Bearer ${token}` } : {};
}

export function setToken(token) { sessionStorage.setItem(KEY, token.trim()); }

export async function ask(name, params) {
  const address = `${name}?${query(params)}`;
  if (stored) {
    const plain = `${name}?${given(params).map(([key, value]) => `${key}=${value}`).join("&")}`;
    if (Object.hasOwn(stored, plain)) return stored[plain];
    throw new ApiError(404, "This page holds a part of the run. Open the run itself with `penstock view` to see the rest.");
  }
  let response;
  try {
    response = await fetch(`api/${address}`, { headers: headers(), cache: "no-store" });
  } catch {
    throw new ApiError(0, "The server does not answer. It may have been stopped; start `penstock view` again.");
  }
  const told = await response.json();
  if (!response.ok) throw new ApiError(response.status, told.error && told.error.message ? told.error.message : String(told.error || response.statusText));
  return told;
}

// Calls `changed` whenever the run changes, until `signal` is aborted. Streams by fetch, so that a token stays in a header.
export async function follow(run, signal, changed) {
  if (stored) return;
  let first = true;
  while (!signal.aborted) {
    try {
      const response = await fetch(`api/live?${query({ run })}`, { headers: headers(), signal });
      if (!response.ok) return;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        if (events.some((event) => event.startsWith("data:"))) {
          if (!first) changed();
          first = false;
        }
      }
    } catch { if (signal.aborted) return; }
    await new Promise((resolve) => setTimeout(resolve, 3000));
  }
}
