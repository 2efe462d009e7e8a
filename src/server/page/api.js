// Requests to this server: the key, errors that say what to do, and the answer as it comes.

const KEY_NAME = 'ebbtide.key';

/** Why a request was not answered; `code` is the server's word for it, or 'unreachable', 'cut_off'. */
export class Failure extends Error {
  constructor(message, code = null, status = 0) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

/** The key, for as long as this tab lives. */
export const key = {
  demanded: document.documentElement.dataset.key === 'demanded',
  get: () => sessionStorage.getItem(KEY_NAME),
  set: (text) => sessionStorage.setItem(KEY_NAME, text),
  forget: () => sessionStorage.removeItem(KEY_NAME),
  missing: () => key.demanded && !key.get(),
};

/** An answer's head; anything but a 2xx becomes a [Failure]. */
async function request(path, options) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: 'no-store', credentials: 'omit' });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Failure('The server cannot be reached. Is it still running?', 'unreachable');
  }
  if (response.ok || options.anyStatus) return response;
  throw await failureOf(response);
}

async function failureOf(response) {
  const body = await response.json().catch(() => null);
  const error = body?.error ?? {};
  return new Failure(error.message ?? `The server answered with status ${response.status}.`, error.code, response.status);
}

export async function status() {
  const response = await request('v1/status', { signal: AbortSignal.timeout(10_000) });
  return response.json();
}

/** Needs no key; while the model is loaded it comes with status 503. */
export async function health() {
  const response = await request('health', { anyStatus: true, signal: AbortSignal.timeout(10_000) });
  return response.json();
}

/** Lines of a body as they come. */
async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      yield* lines;
    }
    if (rest) yield rest;
  } finally {
    // Where the reader of the lines leaves early, the server learns it.
    reader.cancel().catch(() => {});
  }
}

/**
 * An answer as it comes: `{ beat }` is what the server says while nothing is written, `{ chunk }` a piece in OpenAI's form. Each event of
 * this server is one line. Ends without a word only after [DONE].
 */
export async function* streamChat(body, signal) {
  const response = await request('v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  try {
    for await (const line of linesOf(response.body)) {
      if (line.startsWith(':')) yield { beat: line.slice(1).trim() };
      if (!line.startsWith('data:')) continue;
      const data = line.slice(5).trim();
      if (data === '[DONE]') return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Failure(chunk.error.message, chunk.error.code);
      yield { chunk };
    }
  } catch (error) {
    if (error.name === 'AbortError' || error instanceof Failure) throw error;
    throw new Failure('The connection broke off within the answer.', 'cut_off');
  }
  throw new Failure('The answer ended without its end.', 'cut_off');
}
