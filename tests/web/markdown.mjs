// The page's Markdown, in the browser: what text becomes which elements.

import assert from 'node:assert/strict';

/** Text, and the markup that the browser makes of the elements that come of it. */
const CASES = [
  ['a\nb\n\nc', '<p>a\nb</p><p>c</p>'],
  ['**a** *b* _c_ ~~d~~ `e`', '<p><strong>a</strong> <em>b</em> <em>c</em> <del>d</del> <code>e</code></p>'],
  ['***a*** **b *c* d**', '<p><strong><em>a</em></strong> <strong>b <em>c</em> d</strong></p>'],
  ['snake_case_name, 2 * 3 * 4, **open, a ** b', '<p>snake_case_name, 2 * 3 * 4, **open, a ** b</p>'],
  ['``a ` b`` \\*c\\* `open', '<p><code>a ` b</code> *c* `open</p>'],
  ['# One\ntext\n### Two ##', '<h3>One</h3><p>text</p><h5>Two</h5>'],
  ['- a\n- b\n  - c\n\n  d\n- e\n\nf', '<ul><li>a</li><li>b<ul><li>c</li></ul><p>d</p></li><li>e</li></ul><p>f</p>'],
  ['3. a\n4. b', '<ol start="3"><li>a</li><li>b</li></ol>'],
  ['1. a\n   ```\n   x\n   ```\n2. b', '<ol><li>a<pre tabindex="0" aria-label="Code"><code>x</code></pre></li><li>b</li></ol>'],
  ['```rust\nfn <b>() {}\n\n// *x*\n```\nz', '<pre tabindex="0" aria-label="Code, rust"><code>fn &lt;b&gt;() {}\n\n// *x*</code></pre><p>z</p>'],
  ['~~~\nopen\n```', '<pre tabindex="0" aria-label="Code"><code>open\n```</code></pre>'],
  ['> a\n> > b\n\n---', '<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><hr>'],
  ['|a|b|\n|-|:-:|\n|1|`x\\|y`|\n|2|', '<div class="wide" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>'
    + '<tr><td>1</td><td><code>x|y</code></td></tr><tr><td>2</td><td></td></tr></tbody></table></div>'],
  ['[a](https://b.example/c_(d) "t")', '<p><a href="https://b.example/c_(d)" target="_blank" rel="noopener noreferrer" title="https://b.example/c_(d)">a</a></p>'],
  ['![a](https://b.example/c.png)', '<p><a href="https://b.example/c.png" target="_blank" rel="noopener noreferrer" title="https://b.example/c.png">a</a></p>'],
  ['[a](javascript:alert(1)) [b](data:text/html,x) [c](/d)', '<p><span>a</span> <span>b</span> <span>c</span></p>'],
  ['<javascript:x> <img src=x onerror=x> &amp; <b>a</b>', '<p>&lt;javascript:x&gt; &lt;img src=x onerror=x&gt; &amp;amp; &lt;b&gt;a&lt;/b&gt;</p>'],
];

export async function checkMarkdown(page) {
  const made = await page.evaluate(async (texts) => {
    const { showMarkdown } = await import('/page/markdown.js');
    return texts.map((text) => {
      const whole = document.createElement('div');
      showMarkdown(whole, text);
      // As it grows, character after character, it comes to the same.
      const grown = document.createElement('div');
      for (let end = 1; end <= text.length; end += 1) showMarkdown(grown, text.slice(0, end));
      return { whole: whole.innerHTML, grown: grown.innerHTML };
    });
  }, CASES.map(([text]) => text));
  made.forEach(({ whole, grown }, index) => {
    assert.equal(whole, CASES[index][1]);
    assert.equal(grown, whole);
  });

  // Text that would take a careless reader for ever, or down.
  const took = await page.evaluate(async () => {
    const { showMarkdown } = await import('/page/markdown.js');
    const times = {};
    for (const piece of ['>', '*', '[', '`a ', '_a ', '- ', '**a', '![](', '|-', '# ', '\\', '<http:', '(']) {
      const began = performance.now();
      showMarkdown(document.createElement('div'), piece.repeat(20_000));
      times[piece] = Math.round(performance.now() - began);
    }
    return times;
  });
  for (const [piece, ms] of Object.entries(took)) assert.ok(ms < 3000, `20,000 times "${piece}" took ${ms} ms: ${JSON.stringify(took)}`);
}
