// Chromium, driven by playwright-core. Every error of a page's console and every request to elsewhere is remembered.

import assert from 'node:assert/strict';
import { chromium } from 'playwright-core';

export const SIZES = { phone: { width: 360, height: 740 }, desktop: { width: 1280, height: 860 } };

/** Generous: it is only ever waited for where something is wrong, or where the machine is busy with other work. */
export const PATIENCE_MS = 90_000;

const FLAGS = ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'];

/** What went wrong on a page; `allow` names what is meant to go wrong from now on. */
class Problems {
  constructor() {
    this.found = [];
    this.allowed = [];
  }

  add(problem) {
    if (!this.allowed.some((pattern) => pattern.test(problem))) this.found.push(problem);
  }

  allow(pattern) {
    this.allowed.push(pattern);
  }

  /** A problem that was provoked: it must be there, and is gone. */
  forget(pattern) {
    const others = this.found.filter((problem) => !pattern.test(problem));
    assert.ok(others.length < this.found.length, `nothing matched ${pattern}`);
    this.found = others;
  }

  none(when) {
    assert.deepEqual(this.found, [], `no errors on the page ${when}`);
  }
}

export async function openBrowser(executablePath) {
  // Its profile is a fresh folder that goes with it.
  const browser = await chromium.launch({ executablePath, args: FLAGS });
  return {
    close: () => browser.close(),
    async open(base) {
      const context = await browser.newContext({ viewport: SIZES.desktop });
      context.setDefaultTimeout(PATIENCE_MS);
      const page = await context.newPage();
      const problems = new Problems();
      page.on('console', (message) => {
        if (['error', 'warning'].includes(message.type())) problems.add(message.text());
      });
      page.on('pageerror', (error) => problems.add(`thrown: ${error.message}`));
      page.on('request', (request) => {
        if (!request.url().startsWith(base)) problems.add(`a request to ${request.url()}`);
      });
      const response = await page.goto(base);
      const policy = response.headers()['content-security-policy'];
      assert.match(policy, /default-src 'none'/);
      return { page, problems };
    },
  };
}
