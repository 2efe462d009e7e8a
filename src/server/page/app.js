// The page: its parts, the key, and the two views of small screens.

import { key } from './api.js';
import { startChat } from './chat.js';
import { byId, setText } from './dom.js';
import { startMonitor } from './monitor.js';

function showKeyForm(why) {
  const form = byId('key-form');
  const first = form.hidden;
  form.hidden = false;
  if (why) setText(byId('key-why'), why);
  if (first) byId('key').focus();
}

/** Another key is wanted: the one we have, if any, is not it. */
function keyRefused(failure) {
  key.forget();
  showKey();
  showKeyForm(failure.message);
}

function showKey() {
  byId('forget-key').hidden = !key.get();
}

function startKey(look) {
  byId('key-form').addEventListener('submit', (event) => {
    event.preventDefault();
    key.set(byId('key').value.trim());
    byId('key').value = '';
    byId('key-form').hidden = true;
    showKey();
    look();
    byId('prompt').focus();
  });
  byId('forget-key').addEventListener('click', () => {
    key.forget();
    showKey();
    showKeyForm('The key is forgotten.');
  });
  showKey();
  if (key.missing()) showKeyForm();
}

function startViews() {
  const buttons = [...document.querySelectorAll('[data-show]')];
  for (const button of buttons) {
    button.addEventListener('click', () => {
      document.body.dataset.view = button.dataset.show;
      for (const other of buttons) other.setAttribute('aria-pressed', String(other === button));
    });
  }
}

startViews();
startChat(keyRefused);
const { look } = startMonitor(keyRefused);
startKey(look);
