/* Browsers start no Worker for a page that was opened as a file. There the search runs in a hidden frame instead, behind the same calls. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      const script = document.createElement("script");
      script.src = url;
      this.frame.srcdoc = `<script>
        window.postMessage = message => parent.postMessage(message, "*");
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {
          const script = document.createElement("script");
          script.src = url; script.onload = done; document.body.append(script);
        })), Promise.resolve());
      </scr` + `ipt>` + script.outerHTML;
      this.frame.addEventListener("load", () => { this.ready = true; this.waiting.splice(0).forEach(message => this.postMessage(message)); });
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      document.body.append(this.frame);
    }
    postMessage(message) {
      if (!this.ready) { this.waiting.push(message); return; }
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: message }));
    }
    terminate() { this.frame.remove(); }
  };
}
