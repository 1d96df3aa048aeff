#!/usr/bin/env python3
"""Visits pages in Chromium, with scripts enabled and disabled, on screens of 360, 1280 and 2560 pixels, in
light and dark. The screenshots and the version of Chromium are written into a folder, and those of the
run before are kept there. axe-core checks the accessibility of each page. Chromium is controlled over pipes by the DevTools protocol, and it
resolves no name.

    visit.py CHROMIUM AXE FOLDER NAME=URL...
"""

import base64
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import time
import zlib

FLAGS = [
    "--headless",
    # Root has no sandbox. The pages are those of the test.
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--disable-features=OptimizationHints,MediaRouter",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
]
WIDTHS = (360, 1280, 2560)
HEIGHT = 900
# Screenshots are of whole pages up to this height.
HEIGHT_MAX = 4000
PATIENCE = 30.0
INDEX = """NAME-WIDTH-SCHEME.png: whole pages, at 360, 1280 and 2560 pixels, light and dark.
  small      15 nodes                         overview, nodes, ...  20,003 nodes with hostile texts
  empty      an installation without nodes    failing               nodes, requests, files and a server that fail
before/: the same of the run before.
before-console/, where somebody made it: the pages that the console replaced. They are static renders of the
templates of that time (git show 21f75315^:tunnel-server/templates), not of a running server.
"""
# The script of a page replaces its content.
RELOAD = """document.querySelector("main").dataset.isOld = true;
    reload().then(() => !document.querySelector("main").dataset.isOld)"""
# The sections of the page by their headings, with the pixels at which they and their content begin and end.
SECTIONS = """Object.fromEntries([...document.querySelectorAll("main section h2:first-child")].map((heading) => {
    const section = heading.parentElement;
    const {bottom} = section.lastElementChild.getBoundingClientRect();
    return [heading.textContent, [section.getBoundingClientRect().top, bottom]];
}))"""
CHECK = """axe.run({resultTypes: ["violations"]}).then(
    ({violations}) => violations.map(({id, nodes}) => id + ": " + nodes[0].html.slice(0, 200)))"""


class Unexpected(Exception):
    """Chromium did not do what the protocol says."""


class Browser:
    """A running Chromium, the events that it reported, and the answers to commands."""

    def __init__(self, chromium, folder):
        self.net_log = os.path.join(folder, "net-log.json")
        commands, self.commands = os.pipe()
        self.events, events = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={folder}/profile", f"--log-net-log={self.net_log}", "about:blank"]
        # Chromium reads commands from descriptor 3 and writes answers and events to descriptor 4.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{events}'
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", script, chromium, *flags], stderr=subprocess.DEVNULL, pass_fds=(commands, events)
        )
        os.close(commands)
        os.close(events)
        self.number = 0
        self.received = b""

    def message(self):
        """Returns the next message of Chromium."""
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.received:
            ready, _, _ = select.select([self.events], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self.events, 1 << 16) if ready else b""
            if not data:
                raise Unexpected("Chromium sends no message")
            self.received += data
        message, self.received = self.received.split(b"\0", 1)
        return json.loads(message)

    def command(self, method, on_event=None, session=None, **params):
        """Sends a command, and returns its answer. Passes the events in between to `on_event`."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        if session:
            command["sessionId"] = session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data):]
        while True:
            message = self.message()
            if message.get("id") == self.number:
                if "error" in message:
                    raise Unexpected(f"{method}: {message['error']}")
                return message["result"]
            if on_event:
                on_event(message)

    def close(self):
        """Ends Chromium, and returns the URLs and the names that it asked for."""
        self.command("Browser.close")
        self.process.wait(PATIENCE)
        with open(self.net_log) as file:
            log = json.load(file)
        types = log["constants"]["logEventTypes"]
        wanted = {types["URL_REQUEST_START_JOB"]: "url", types["HOST_RESOLVER_MANAGER_REQUEST"]: "host"}
        asked = (event.get("params", {}).get(wanted.get(event["type"])) for event in log["events"])
        return sorted({text for text in asked if text})


class Visit:
    """One page in a tab of its own."""

    def __init__(self, browser, url, has_scripts):
        self.browser = browser
        # The URLs of the scripts that were run, the texts of their dialogs, and the errors in the log.
        self.scripts, self.dialogs, self.violations = [], [], []
        self.requests = []
        self.is_loaded = False
        self.target = browser.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.command("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Audits", "Debugger", "DOM"):
            self.command(f"{domain}.enable")
        self.command("Emulation.setScriptExecutionDisabled", value=not has_scripts)
        self.screen(1280, "light")
        answer = self.command("Page.navigate", url=url)
        if "errorText" in answer:
            raise Unexpected(f"{url}: {answer['errorText']}")
        while not self.is_loaded:
            self.event(browser.message())

    def command(self, method, **params):
        return self.browser.command(method, on_event=self.event, session=self.session, **params)

    def event(self, message):
        if message.get("sessionId") != self.session:
            return
        method, params = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self.is_loaded = True
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            # The answer is of no interest, and comes with the events.
            data = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            os.write(self.browser.commands, json.dumps({**data, "sessionId": self.session}).encode() + b"\0")
        elif method == "Debugger.scriptParsed":
            self.scripts.append(params["url"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.violations.append(params["entry"]["text"])
        elif method == "Audits.issueAdded" and params["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.violations.append(params["issue"]["code"])

    def screen(self, width, scheme):
        """Selects a screen. The narrow one is that of a phone."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=HEIGHT, deviceScaleFactor=1, mobile=width == WIDTHS[0]
        )
        scheme = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def close(self):
        self.browser.command("Target.closeTarget", targetId=self.target)

    def screenshot(self, width, height):
        """Returns an image of the page from its first line on."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        params = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self.command("Page.captureScreenshot", **params)["data"])

    def facts(self):
        """Returns the elements, the attributes and the texts of the page, and what it did."""
        elements, attributes, texts = set(), set(), []
        nodes = [self.command("DOM.getDocument", depth=-1)["root"]]
        while nodes:
            node = nodes.pop()
            nodes.extend(reversed(node.get("children", [])))
            if node["nodeType"] == 1:
                elements.add(node["localName"])
                attributes.update(node["attributes"][::2])
                texts.extend(node["attributes"][1::2])
            elif node["nodeType"] == 3:
                texts.append(node["nodeValue"])
        return {
            "elements": sorted(elements),
            "attributes": sorted(attributes),
            "text": "\n".join(texts),
            "scripts": list(self.scripts),
            "dialogs": list(self.dialogs),
            "violations": list(self.violations),
            "requests": list(self.requests),
        }

    def evaluate(self, expression):
        answer = self.command("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return answer["result"].get("value")

    def barriers(self, axe):
        """Returns what axe finds on the page: the rule and the first element of each violation."""
        self.command("Runtime.evaluate", expression=axe)
        return self.evaluate(CHECK)

    def screens(self, path, axe):
        """Writes the screenshots, and returns the width of the content, the background and the barriers."""
        screens = []
        for width in WIDTHS:
            for scheme in ("light", "dark"):
                self.screen(width, scheme)
                content = self.command("Page.getLayoutMetrics")["cssContentSize"]
                whole = self.screenshot(width, min(content["height"], HEIGHT_MAX))
                keep(f"{path}-{width}-{scheme}.png", whole)
                background = pixel(self.screenshot(1, 1))
                screens.append({"width": width, "scheme": scheme, "content": content["width"], "background": background})
                screens[-1]["barriers"] = self.barriers(axe)
                screens[-1]["sections"] = self.evaluate(SECTIONS)
        return screens


def keep(path, image):
    """Writes an image. The one that was there is moved into the folder `before`, to compare both."""
    folder, name = os.path.split(path)
    before = os.path.join(folder, "before")
    os.makedirs(before, exist_ok=True)
    if os.path.exists(path):
        os.replace(path, os.path.join(before, name))
    with open(path, "wb") as file:
        file.write(image)


def pixel(png):
    """Returns red, green and blue of an image of one pixel."""
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at:at + 4])
        if png[at + 4:at + 8] == b"IDAT":
            data += png[at + 8:at + 8 + length]
        at += length + 12
    # The first byte is the filter, which changes nothing in the first pixel.
    return list(zlib.decompress(data)[1:4])


def main():
    chromium, axe, folder, *named = sys.argv[1:]
    with open(axe) as file:
        axe = file.read()
    os.makedirs(folder, exist_ok=True)
    pages = []
    with tempfile.TemporaryDirectory() as scratch:
        browser = Browser(chromium, scratch)
        try:
            version = browser.command("Browser.getVersion")["product"]
            for name, url in (page.split("=", 1) for page in named):
                for has_scripts in (True, False):
                    visit = Visit(browser, url, has_scripts)
                    facts = {"name": name, "hasScripts": has_scripts, **visit.facts()}
                    if has_scripts:
                        facts["reloads"] = visit.evaluate(RELOAD)
                        facts["screens"] = visit.screens(os.path.join(folder, name), axe)
                    pages.append(facts)
                    visit.close()
            asked = browser.close()
        finally:
            browser.process.kill()
            browser.process.wait()
    with open(os.path.join(folder, "chromium-version"), "w") as file:
        file.write(version + "\n")
    with open(os.path.join(folder, "index.txt"), "w") as file:
        file.write(INDEX)
    print(json.dumps({"version": version, "asked": asked, "pages": pages}))


if __name__ == "__main__":
    main()
