// `ebbtide serve` as a process.

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';

/** Starts a server at a free port and waits until it is ready. */
export async function startServer(engine, flags) {
  const child = spawn(engine, ['serve', ...flags, '--port', '0'], { stdio: ['ignore', 'ignore', 'pipe'] });
  const gone = once(child, 'exit');
  const log = [];
  let base;
  const lines = createInterface({ input: child.stderr });
  await new Promise((resolve, reject) => {
    child.on('error', reject);
    child.on('exit', (code) => reject(new Error(`the server ended with ${code}:\n${log.join('\n')}`)));
    lines.on('line', (line) => {
      log.push(line);
      base ??= /http:\/\/[\d.]+:\d+/.exec(line)?.[0];
      if (line.startsWith('ready')) resolve();
    });
  });
  return {
    base,
    async stop() {
      if (child.exitCode === null && child.signalCode === null) child.kill('SIGTERM');
      await gone;
    },
  };
}
