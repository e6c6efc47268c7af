// The page's frame: who is signed in, which view is open, and what every view needs of both.
import { render } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { get, storedKey, storeKey } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Conversation } from "./conversation.js";
import { Requests } from "./requests.js";
import { SignIn } from "./sign_in.js";
import { Trace } from "./trace.js";
import { Fault, html, Loading } from "./ui.js";

const RETRY_MS = 3000;
const VIEWS = [
  { name: "requests", title: "Requests" },
  { name: "cluster", title: "Cluster", admin: true },
  { name: "chat", title: "Chat" },
];
const conversation = new Conversation();

// `#/trace/ID` → {view: "trace", id: "ID"}.
function route() {
  const [view, id = ""] = location.hash.replace(/^#\/?/, "").split("/");
  return { view: view || "requests", id: decode(id) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function App() {
  const [identity, setIdentity] = useState(null);
  const [error, setError] = useState(null);
  const [asked, setAsked] = useState(storedKey() ? 1 : 0);

  useEffect(() => {
    if (!storedKey()) return undefined;
    const stop = new AbortController();
    let timer = 0;
    get("baton/identity", stop.signal).then(
      (found) => {
        conversation.handTo(`${found.tenant}/${found.admin}`);
        setError(null);
        setIdentity(found);
      },
      (fault) => {
        if (stop.signal.aborted) return;
        if (fault.kind === "key") storeKey("");
        setError(fault);
        if (fault.passing) timer = setTimeout(() => setAsked((count) => count + 1), RETRY_MS);
      },
    );
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [asked]);

  function signIn(key) {
    storeKey(key);
    setError(null);
    setAsked((count) => count + 1);
  }
  function signOut(fault = null) {
    storeKey("");
    setIdentity(null);
    setError(fault);
    // a refused key may have been changed in between: what was typed waits for its owner
    if (!fault) conversation.clear();
    setAsked(0);
  }
  if (identity) return html`<${Console} identity=${identity} onSignOut=${() => signOut()} onKeyRefused=${signOut} />`;
  if (storedKey() && asked) {
    return html`<main class="narrow">
      ${error ? html`<${Fault} error=${error} />` : html`<${Loading} what="the console" />`}
      <p><button type="button" onClick=${() => signOut()}>Use another key</button></p>
    </main>`;
  }
  return html`<${SignIn} error=${error} onKey=${signIn} />`;
}

function Console({ identity, onSignOut, onKeyRefused }) {
  const [at, setAt] = useState(route());
  const [live, setLive] = useState(true);
  const visited = useRef({ moves: 0, trace: "" });

  useEffect(() => {
    const onHash = () => {
      visited.current.moves += 1;
      setAt(route());
    };
    addEventListener("hashchange", onHash);
    return () => removeEventListener("hashchange", onHash);
  }, []);
  useEffect(() => {
    const onKey = (event) => {
      if (event.key === "Escape" && !event.defaultPrevented && route().view === "trace") location.hash = "#/requests";
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);

  const views = VIEWS.filter((view) => identity.admin || !view.admin);
  const open = views.find((view) => view.name === at.view);
  useEffect(() => {
    document.title = `${open ? open.title : at.view === "trace" ? "Trace" : "Not found"} · Baton console`;
  }, [at.view]);
  const cameFrom = at.view === "requests" ? visited.current.trace : "";
  visited.current.trace = at.view === "trace" ? at.id : "";
  const common = { live, focus: visited.current.moves > 0, onKeyRefused };
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <header>
      <p class="brand">Baton</p>
      <nav aria-label="Views">
        ${views.map((view) => html`<a key=${view.name} href=${`#/${view.name}`}
          aria-current=${view.name === at.view ? "page" : null}>${view.title}</a>`)}
      </nav>
      <div class="who-is-here">
        <label class="check"><input type="checkbox" checked=${live}
          onChange=${(event) => setLive(event.currentTarget.checked)} /> Live</label>
        <span class="identity">${identity.tenant}${identity.admin ? html` <span class="chip">all tenants</span>` : ""}</span>
        <button type="button" onClick=${onSignOut}>Sign out</button>
      </div>
    </header>
    <main id="main" tabindex="-1">
      ${at.view === "requests" && html`<${Requests} key="requests" ...${common} cameFrom=${cameFrom} />`}
      ${at.view === "trace" && html`<${Trace} key=${at.id} ...${common} id=${at.id} />`}
      ${open?.name === "cluster" && html`<${Cluster} key="cluster" ...${common} />`}
      ${at.view === "chat" && html`<${Chat} key="chat" ...${common} conversation=${conversation} />`}
      ${!open && at.view !== "trace" && html`<p class="empty">There is no such view for this key.
        <a href="#/requests">Recent requests</a></p>`}
    </main>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
