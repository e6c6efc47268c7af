// Asks for the key everything is asked with.
import { useEffect, useRef } from "./vendor/hooks.js";
import { Fault, html } from "./ui.js";

export function SignIn({ error, onKey }) {
  const box = useRef(null);
  useEffect(() => box.current.focus(), [error]);
  function submit(event) {
    event.preventDefault();
    const key = box.current.value.trim();
    if (key) onKey(key);
  }
  return html`<main class="narrow">
    <h1>Baton console</h1>
    <form onSubmit=${submit}>
      ${error && html`<${Fault} error=${error} />`}
      <label for="key">API key</label>
      <input id="key" ref=${box} type="password" autocomplete="off" spellcheck="false" required
        aria-invalid=${Boolean(error)} aria-describedby="key-help" />
      <p id="key-help" class="quiet">A tenant's key shows that tenant's requests and the chat; the admin key shows
        everything. The key stays in this tab and is forgotten when it closes. <code>./baton up</code> prints both.</p>
      <button type="submit" class="primary">Sign in</button>
    </form>
  </main>`;
}
