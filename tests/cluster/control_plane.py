"""The control plane of the node cloud-1, with kubeadm's flags, and a client of its API."""

import http.client
import json
import secrets
import socket
import ssl
import subprocess
import threading

from nodes import CONTROL_PLANE, wait

SERVICES = "10.96.0.0/16"


class Pki:
    """The CA of the cluster and certificates of it."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        run(["openssl", "req", "-x509", "-new", *KEY, "-nodes", "-days", "30", "-subj", "/CN=kubernetes",
             "-keyout", self.file("ca.key"), "-out", self.file("ca.crt")])
        run(["openssl", "genrsa", "-out", self.file("accounts.key"), "2048"])

    def file(self, name):
        return self.folder / name

    def issue(self, name, subject, alternatives=None):
        key, request, certificate = (self.file(f"{name}.{end}") for end in ("key", "csr", "crt"))
        run(["openssl", "req", "-new", *KEY, "-nodes", "-subj", subject, "-keyout", key, "-out", request])
        usage = "extendedKeyUsage=serverAuth,clientAuth\n"
        extensions = self.file(f"{name}.ext")
        names = f"subjectAltName={alternatives}\n" if alternatives else ""
        extensions.write_text(usage + names, encoding="ascii")
        run(["openssl", "x509", "-req", "-in", request, "-CA", self.file("ca.crt"), "-CAkey", self.file("ca.key"),
             # The file of serial numbers would be for one process at a time.
             "-set_serial", secrets.randbits(100), "-days", "30", "-extfile", extensions, "-out", certificate])

    def kubeconfig(self, name, subject):
        self.issue(name, subject)
        cluster = {"server": f"https://{CONTROL_PLANE}:6443", "certificate-authority": str(self.file("ca.crt"))}
        user = {"client-certificate": str(self.file(f"{name}.crt")), "client-key": str(self.file(f"{name}.key"))}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}], "users": [{"name": "c", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        }
        file = self.file(f"{name}.kubeconfig")
        file.write_text(json.dumps(config), encoding="ascii")
        return file


KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]


def run(command, **options):
    words = [str(word) for word in command]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if ended.returncode:
        raise OSError(f"{' '.join(words)}: {ended.stderr.strip()}")
    return ended.stdout


class ControlPlane:
    """etcd, kube-apiserver, kube-controller-manager and kube-scheduler in the namespaces of a node."""

    def __init__(self, node, binaries, work):
        self.node, self.binaries = node, binaries
        self.pki = Pki(work / "pki")
        pki = self.pki
        names = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
        pki.issue("apiserver", "/CN=kube-apiserver", f"{names},IP:{CONTROL_PLANE},IP:10.96.0.1,IP:127.0.0.1")
        pki.issue("apiserver-kubelet-client", "/CN=kube-apiserver-kubelet-client/O=kubeadm:cluster-admins")
        self.admin = pki.kubeconfig("admin", "/O=system:masters/CN=kubernetes-admin")
        # The resolvers of kube-apiserver are a file that `resolve_with` fills.
        self.resolvers = work / "resolv.conf"
        self.resolvers.write_text("", encoding="ascii")
        node.script(f"mount --bind {self.resolvers} $(readlink -f /etc/resolv.conf)")

    def start(self):
        pki, folder = self.pki, self.node.folder
        self.node.start("etcd", [
            self.binaries / "etcd", f"--data-dir={folder}/etcd", "--unsafe-no-fsync=true", "--log-level=warn",
        ])
        self.start_apiserver()
        self.node.start("kube-controller-manager", [
            self.binaries / "kube-controller-manager",
            f"--kubeconfig={pki.kubeconfig('kcm', '/CN=system:kube-controller-manager')}", "--leader-elect=false",
            "--use-service-account-credentials=true",
            f"--service-account-private-key-file={pki.file('accounts.key')}", f"--root-ca-file={pki.file('ca.crt')}",
            f"--cluster-signing-cert-file={pki.file('ca.crt')}", f"--cluster-signing-key-file={pki.file('ca.key')}",
        ])
        self.node.start("kube-scheduler", [
            self.binaries / "kube-scheduler",
            f"--kubeconfig={pki.kubeconfig('scheduler', '/CN=system:kube-scheduler')}", "--leader-elect=false",
        ])

    def start_apiserver(self, *flags):
        pki = self.pki
        self.node.start("kube-apiserver", [
            self.binaries / "kube-apiserver", f"--advertise-address={CONTROL_PLANE}", "--secure-port=6443",
            "--etcd-servers=http://127.0.0.1:2379", f"--service-cluster-ip-range={SERVICES}",
            f"--tls-cert-file={pki.file('apiserver.crt')}", f"--tls-private-key-file={pki.file('apiserver.key')}",
            f"--client-ca-file={pki.file('ca.crt')}",
            f"--kubelet-client-certificate={pki.file('apiserver-kubelet-client.crt')}",
            f"--kubelet-client-key={pki.file('apiserver-kubelet-client.key')}",
            "--kubelet-preferred-address-types=Hostname,InternalIP,ExternalIP",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={pki.file('accounts.key')}",
            f"--service-account-signing-key-file={pki.file('accounts.key')}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", *flags,
        ])

    def resolve_with(self, *nameservers):
        """Sets the nameservers of kube-apiserver, with the options of the tutorial."""
        lines = [f"nameserver {address}" for address in nameservers]
        lines.append("options ndots:0 timeout:1 attempts:2")
        with open(self.resolvers, "w", encoding="ascii") as file:
            file.write("\n".join(lines) + "\n")


class Api:
    """A client of kube-apiserver. Each thread has a connection of its own."""

    def __init__(self, pki):
        self.context = ssl.create_default_context(cafile=pki.file("ca.crt"))
        self.context.load_cert_chain(pki.file("admin.crt"), pki.file("admin.key"))
        self.local = threading.local()

    def connection(self, timeout):
        return http.client.HTTPSConnection(CONTROL_PLANE, 6443, context=self.context, timeout=timeout)

    def socket(self, timeout):
        plain = socket.create_connection((CONTROL_PLANE, 6443), timeout=timeout)
        return self.context.wrap_socket(plain, server_hostname=CONTROL_PLANE)

    def request(self, method, path, body=None, kind="application/json"):
        for is_last in (False, True):
            connection = getattr(self.local, "connection", None)
            if connection is None:
                connection = self.local.connection = self.connection(30)
            try:
                headers = {"Content-Type": kind} if body is not None else {}
                connection.request(method, path, json.dumps(body) if body is not None else None, headers)
                answer = connection.getresponse()
                text = answer.read()
                break
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                self.local.connection = None
                if is_last:
                    raise OSError(str(error)) from error
        if answer.status >= 300:
            raise OSError(f"{method} {path}: {answer.status} {text[:300]!r}")
        return json.loads(text) if text.startswith(b"{") else text.decode(errors="replace")

    def get(self, path):
        return self.request("GET", path)

    def patch(self, path, body):
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def wait_until_up(self):
        wait("kube-apiserver", 60, lambda: self.get("/readyz") == "ok")
