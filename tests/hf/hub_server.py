"""A small server that speaks the routes of the Hugging Face hub which its client uses for models."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FILES = re.compile(r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<rev>\w+)/(?P<file>.+)")
UPLOADS = re.compile(r"/api/models/([\w.-]+/[\w.-]+)/(preupload|commit)/main")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What the server keeps."""

    def __init__(self):
        self.repos, self.private, self.tokens, self.requests = {}, {}, [], []
        self.refuse = None
        self.url = ""


@contextmanager
def running_hub():
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            hub.requests.append(f"{self.command} {self.path}")
            path = self.path.split("?")[0]
            if match := FILES.fullmatch(path):
                files = hub.repos.get(match["repo"], {})
                if match["file"] not in files:
                    return self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                content = files[match["file"]]
                etag = hashlib.sha1(content).hexdigest()
                return self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(/.*)?", path):
                if match[1] not in hub.repos:
                    return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                files = hub.repos[match[1]]
                if "/tree/" in (match[2] or ""):
                    tree = [
                        {"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                        for n, c in files.items()
                    ]
                    return self.json(tree)
                return self.json(
                    {
                        "id": match[1],
                        "modelId": match[1],
                        "sha": COMMIT,
                        "private": hub.private.get(match[1], False),
                        "siblings": [{"rfilename": name} for name in files],
                        "tags": [],
                        "downloads": 0,
                        "likes": 0,
                    }
                )
            return self.answer(404, b"")

        def do_POST(self):
            hub.requests.append(f"POST {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Authorization"):
                hub.tokens.append(self.headers["Authorization"])
            if hub.refuse is not None:
                return self.json({"error": hub.refuse}, 403)
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                owner = asked.get("organization") or "me"
                repo = f"{owner}/{asked['name']}"
                hub.repos.setdefault(repo, {})
                hub.private[repo] = bool(asked.get("private")) or asked.get("visibility") == "private"
                return self.json({"url": f"{hub.url}/{repo}", "name": repo, "id": "1"})
            if self.path == "/api/validate-yaml":
                return self.json({"errors": [], "warnings": []})
            match = re.fullmatch(
                r"/api/models/([\w.-]+/[\w.-]+)/(preupload|commit)/main", self.path.split("?")[0]
            )
            if match and match[2] == "preupload":
                files = json.loads(body)["files"]
                return self.json(
                    {
                        "files": [
                            {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                            for each in files
                        ]
                    }
                )
            if match:
                for line in body.decode().splitlines():
                    item = json.loads(line)
                    if item["key"] == "file":
                        content = base64.b64decode(item["value"]["content"])
                        hub.repos[match[1]][item["value"]["path"]] = content
                url = f"{hub.url}/{match[1]}/commit/{COMMIT}"
                return self.json({"commitUrl": url, "commitOid": COMMIT, "success": True})
            return self.answer(404, b"")

        def json(self, value, status=200):
            self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, status, content, headers=None):
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
