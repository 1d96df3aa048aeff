"""The rows of the table: what happens to the cluster, what is measured, and the goals."""

import socket
import threading
import time
import traceback
import urllib.request
from collections import Counter
from datetime import datetime, timezone
from functools import partial

from cluster import APPS, EDGES, HOST_RESOLVER, LINES, LISTENER, PODS, SERVERS, SYSTEM, TRANSPORTS
from load import Calls, Follow, Repeated, Watch, dial_listener, execute, now, resolve
from nodes import PATIENCE, wait
from result import Result

SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
# Followed logs of each node.
FOLLOWED = 10
# `--drain-delay` and `--drain-timeout` of the manifests.
DRAIN = 5 + 30
# Connections per second to a listener, to see for how long it refuses them.
CONNECTS = 25
VIA = "cut via a server that drained"
# The resolvers of kube-apiserver: those of the tutorial, and others to compare with.
RESOLVERS = {
    "as in the tutorial": (lambda cluster: [cluster.dns, HOST_RESOLVER], 2),
    "tunnel-dns alone, attempts:2": (lambda cluster: [cluster.dns], 2),
    "tunnel-dns alone, attempts:5": (lambda cluster: [cluster.dns], 5),
}
# Most seconds of a QUIC session behind a firewall whose entries kube-proxy removes: the agent's
# keep-alive with its jitter, and a second.
KEEP_ALIVE = 5 * 1.2 + 1


def followed(cluster, edge, count=FOLLOWED):
    follows = [Follow(cluster.api, PODS[edge]) for _ in range(count)]
    wait("followed logs", 30, lambda: all(len(follow.times) > 2 for follow in follows))
    return follows


class Sessions(threading.Thread):
    """Samples how many sessions an agent has, each second."""

    def __init__(self, node):
        super().__init__(daemon=True)
        self.node, self.samples, self.stopping = node, [], threading.Event()
        self.start()

    def run(self):
        self.node.enter()
        while not self.stopping.wait(1):
            self.samples.append((now(), self.connected()))

    def connected(self):
        try:
            with urllib.request.urlopen("http://127.0.0.1:10266/metrics", timeout=2) as answer:
                text = answer.read().decode()
        except OSError:
            return 0
        series = 'tunnel_agent_sessions{state="connected"'
        return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(series))

    def stop(self):
        self.stopping.set()
        self.join()

    def longest_below(self, count, since):
        """Returns the longest time with fewer sessions."""
        longest, began = 0.0, None
        for at, connected in self.samples:
            if at < since or connected >= count:
                began = None
            else:
                began = began or at
                longest = max(longest, at + 1 - began)
        return longest


class Slices(threading.Thread):
    """Samples the endpoints of the agents' Service: whether one that terminates is said not to serve."""

    def __init__(self, cluster):
        super().__init__(daemon=True)
        self.cluster, self.stopping, self.terminating, self.lost = cluster, threading.Event(), set(), set()
        self.start()

    def run(self):
        selector = "kubernetes.io%2Fservice-name%3Dx-tunnel-server-svc"
        path = f"/apis/discovery.k8s.io/v1/namespaces/kube-system/endpointslices?labelSelector={selector}"
        while not self.stopping.wait(0.5):
            for item in self.cluster.api.get(path)["items"]:
                for endpoint in item["endpoints"] or []:
                    conditions, pod = endpoint["conditions"], endpoint["targetRef"]["name"]
                    if conditions.get("terminating"):
                        self.terminating.add(pod)
                        if not conditions.get("serving"):
                            self.lost.add(pod)

    def stop(self):
        self.stopping.set()
        self.join()


def servers_are_replaced(cluster):
    """1: `kubectl rollout restart` of three servers under calls and followed logs, which also replaces
    all endpoints of a UDP Service. 12: the agents' sessions meanwhile."""

    def restart():
        cluster.restart(SERVERS)
        cluster.wait_for_servers(180)

    return replace_servers(cluster, "1 servers are replaced", "12 sessions after that", restart, KEEP_ALIVE)


def server_of_a_host_is_replaced(cluster):
    """hp: as row 1 for one server of the overlay hostport, whose agents dial a port that is no node port."""
    cluster.use_host_ports()
    server = next(pod["metadata"]["name"] for pod in cluster.servers() if pod["spec"]["nodeName"] == "cloud-2")
    results = replace_servers(
        cluster, "hp server of a host is replaced", "hp sessions after that",
        lambda: cluster.api.request("DELETE", f"{SYSTEM}/pods/{server}"), 1,
    )
    cluster.wait_for_servers(120)
    return results


def replace_servers(cluster, row, row_of_sessions, replace, slowest):
    follows = {edge: followed(cluster, edge) for edge in EDGES}
    calls = {edge: Calls(cluster.api, PODS[edge]) for edge in EDGES}
    sessions = {node.name: Sessions(node) for node in cluster.network.edges}
    slices = Slices(cluster)
    before = cluster.servers()
    time.sleep(3)
    began, date = now(), datetime.now(timezone.utc).isoformat()
    replace()
    cluster.say(f"new servers after {now() - began:.0f} s; the old ones drain")

    def is_drained():
        pods = {pod["metadata"]["name"]: pod for pod in cluster.servers()}
        old = [pods.get(pod["metadata"]["name"]) for pod in before]
        return not any(pod and "deletionTimestamp" in pod["metadata"] for pod in old)

    wait("the old servers", 120, is_drained)
    time.sleep(5)
    slices.stop()
    ended = [line for line in cluster.logs.lines("tunnel-server") if is_followed(line) and line["timestamp"] > date]
    results = []
    for edge, transport in TRANSPORTS.items():
        limit = slowest if transport == "quic" else 1
        goal = f"0 failed, slowest {limit:.0f} s, streams to the end of the drain, with its reason"
        result = Result(row, transport, goal)
        result.count(calls[edge].stop())
        for follow in follows[edge]:
            follow.close()
        result.follow(follows[edge], began)
        terminated, lost = slices.terminating, slices.lost
        result.notes.append(f"{len(terminated)} endpoints terminated, {len(lost)} of them did not serve to the end")
        reasons = Counter(reason(line, terminated) for line in ended if line["node"] == edge)
        listed = ", ".join(f"{count} {code}" for code, count in reasons.items())
        result.notes.append(f"ends in the servers' access logs: {listed}")
        drained = [follow for follow in follows[edge] if follow.end != "closed"]
        result.expect(set(reasons) <= {"draining", VIA}, "a stream ended without its reason")
        result.expect(not result.failed, "calls failed")
        result.expect(result.slowest <= limit * PATIENCE, "a call was slow")
        result.expect(result.silence <= 3, "a stream was silent")
        is_all = len(terminated) == len(before)
        result.expect(not is_all or len(drained) == len(follows[edge]), "a stream did not end")
        result.expect(all(follow.ended - began >= DRAIN - 2 for follow in drained), "a stream ended before its drain")
        results.append(result)
    for node in cluster.network.edges:
        sampled = sessions[node.name]
        sampled.stop()
        result = Result(row_of_sessions, TRANSPORTS[node.name], "two sessions again within 10 s")
        one = sampled.longest_below(2, began)
        result.notes.append(f"fewer than two sessions for at most {one:.0f} s")
        result.expect(one <= 10, "one session for long")
        results.append(result)
    return results


def is_followed(line):
    """Returns whether a line of a server's access log is that of a followed log."""
    is_log = line["message"] == "access" and "/containerLogs/" in line.get("request", "")
    return is_log and line["elapsed"] > DRAIN - 2


def reason(line, terminated):
    """Returns the code of a stream. A server that forwarded it names the one that drained."""
    return VIA if line["code"] == "cut" and line.get("via") in terminated else line["code"]


def endpoints_of_another_service_change(cluster):
    """2: on edges with kube-proxy and a stateful firewall, each change of a UDP Service's endpoints."""
    return change_endpoints(cluster, "2 endpoints of another UDP Service change, 4 times", KEEP_ALIVE, 4)


def change_endpoints(cluster, row, slowest, count):
    if not cluster.changes:
        add_service(cluster)
    calls = {edge: Calls(cluster.api, PODS[edge]) for edge in EDGES}
    for _ in range(count):
        time.sleep(7)
        cluster.changes += 1
        address = f"10.244.2.{200 + cluster.changes}"
        cluster.api.patch(f"{SLICES}/other", {"endpoints": [{"addresses": [address]}]})
    time.sleep(7)
    results = []
    for edge, transport in TRANSPORTS.items():
        result = Result(row, transport, f"0 failed, slowest {slowest:.0f} s (QUIC) or 1 s")
        result.count(calls[edge].stop())
        result.expect(not result.failed, "calls failed")
        result.expect(result.slowest <= (slowest if transport == "quic" else 1) * PATIENCE, "a call was slow")
        results.append(result)
    return results


def add_service(cluster):
    """Adds a Service whose endpoints are no pods."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "other"},
               "spec": {"ports": [{"name": "p", "protocol": "UDP", "port": 5353}]}}
    cluster.api.request("POST", "/api/v1/namespaces/default/services", service)
    labels = {"kubernetes.io/service-name": "other"}
    slices = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
              "metadata": {"name": "other", "labels": labels},
              "endpoints": [{"addresses": ["10.244.2.200"]}],
              "ports": [{"name": "p", "protocol": "UDP", "port": 5353}]}
    cluster.api.request("POST", SLICES, slices)


def agents_are_replaced(cluster):
    """3: rolling update of the DaemonSets under calls and followed logs. 4: the listener of the agent
    that leads clients of the node to the API server, with a watch open."""
    follows = {edge: followed(cluster, edge, 3) for edge in EDGES}
    calls = {edge: Calls(cluster.api, PODS[edge]) for edge in EDGES}
    dials, connects, watches = {}, {}, []
    for node in cluster.network.edges:
        watches.append(Watch(LISTENER, cluster.control.pki, node))
        dials[node.name] = Repeated(lambda: dial_listener(LISTENER, cluster.control.pki), enter=node.enter)
        connects[node.name] = Repeated(lambda: socket.create_connection(LISTENER, 5).close(), CONNECTS, node.enter)
    time.sleep(3)
    began = now()
    for transport in TRANSPORTS.values():
        cluster.restart(f"{APPS}/daemonsets/tunnel-agent-{transport}")
    cluster.wait_for_agents(180)
    cluster.say(f"agents replaced in {now() - began:.0f} s")
    time.sleep(5)
    results = []
    for edge, transport in TRANSPORTS.items():
        result = Result("3 agents are replaced", transport, "at most 1 s without service")
        result.count(calls[edge].stop())
        for follow in follows[edge]:
            follow.close()
        result.follow(follows[edge], began)
        result.notes.append(f"{result.away:.1f} s without service")
        result.expect(result.away <= 1.1, "no service")
        results.append(result)
    for edge, transport in TRANSPORTS.items():
        goal = "at most 1 s without service, refused for at most 0.2 s"
        result = Result("4 clients of the API server on the node meanwhile", transport, goal)
        outcomes = dials[edge].stop()
        result.count(outcomes)
        refusals = [outcome.error for outcome in connects[edge].stop() if "Refused" in (outcome.error or "")]
        refused = len(refusals) / CONNECTS
        result.notes.append(f"refused for {refused:.2f} s, {result.away:.1f} s without service")
        result.expect(refused <= 0.2, "refused")
        result.expect(result.away <= 1.1, "no service")
        results.append(result)
    for one in watches:
        one.stopping = True
    return results


def host_is_lost(cluster):
    """9: the host of one of three servers is cut off, until its Node is not ready, and for 10 s more;
    then again for 30 s, with Services that prefer the server of the caller's own host."""
    results = lose_host(cluster, "9 host of one of three servers is lost", None)
    prefer(cluster, "PreferSameNode")
    time.sleep(10)
    results += lose_host(cluster, "9 the same with PreferSameNode", 30)
    prefer(cluster, None)
    return results


def prefer(cluster, distribution):
    for service in ("tunnel-dns", "x-tunnel-server-internal-svc"):
        cluster.api.patch(f"{SYSTEM}/services/{service}", {"spec": {"trafficDistribution": distribution}})


def lose_host(cluster, what, seconds):
    host = cluster.network.cloud[2]
    server = next(pod["metadata"]["name"] for pod in cluster.servers() if pod["spec"]["nodeName"] == host.name)
    kept = {edge: Calls(cluster.api, PODS[edge]) for edge in EDGES}
    time.sleep(5)
    # kube-apiserver has one connection for each node, to any of the servers.
    served = Counter(line.get("node") for line in cluster.logs.lines(server) if line["message"] == "access")
    time.sleep(2)
    latest = Counter(line.get("node") for line in cluster.logs.lines(server) if line["message"] == "access")
    began = now()
    cluster.network.cut(host, True)
    new = {edge: Repeated(lambda edge=edge: execute(cluster.api, PODS[edge]), 2) for edge in EDGES}
    lookups = {what: Repeated(partial(resolve, servers(cluster), "edge-1", attempts), 4)
               for what, (servers, attempts) in RESOLVERS.items()}
    if seconds:
        time.sleep(seconds)
        until = f"measured for {seconds} s"
    else:
        wait("the Node that is not ready", 90, lambda: not cluster.is_ready(host.name))
        until = f"the Node was not ready after {now() - began:.0f} s"
        cluster.say(until)
        time.sleep(10)
    # First: a stop waits for what is pending, and the others would go on meanwhile.
    lookups = {what: repeated.stop() for what, repeated in lookups.items()}
    outcomes = {edge: (kept[edge].stop(), new[edge].stop()) for edge in EDGES}
    cluster.network.cut(host, False)
    results = []
    for edge, transport in TRANSPORTS.items():
        if latest[edge] > served[edge]:
            result = Result(f"{what}: connection to its server", transport, "measured: calls dial anew")
            result.count(outcomes[edge][0])
        else:
            result = Result(f"{what}: kept connection", transport, "0 failed, but for calls that had to dial")
            result.count(outcomes[edge][0])
            failed = [outcome.error for outcome in outcomes[edge][0] if outcome.error]
            result.expect(all("dial tcp" in error for error in failed), "calls failed")
        results.append(result)
    for edge, transport in TRANSPORTS.items():
        result = Result(f"{what}: new connections (exec)", transport, "0 failed" if seconds else "measured")
        result.count(outcomes[edge][1])
        slow = sum(outcome.took > 2 for outcome in outcomes[edge][1])
        result.notes.append(f"{slow} took more than 2 s; {until}")
        result.expect(not seconds or not result.failed, "connections failed")
        results.append(result)
    for resolvers, outcomes in lookups.items():
        result = Result(f"{what}: DNS, {resolvers}", "-", "within 3 s")
        result.count(outcomes)
        slow = sum(outcome.took > 1 for outcome in outcomes)
        result.notes.append(f"{slow} took more than 1 s")
        result.expect(not result.failed and result.slowest <= 3, "lookups failed or were slow")
        results.append(result)
    wait(f"{host.name} again", 120, lambda: cluster.is_ready(host.name))
    cluster.wait_for_servers(120)
    return results


def agents_dial_a_load_balancer(cluster):
    """lb: agents dial a load balancer, whose address an edge's kube-proxy leads to pods itself unless
    its `ipMode` is Proxy; then as row 2, over a port that is no node port."""
    cluster.use_load_balancer()
    time.sleep(15)
    # Not one of the next agents connects, so the ones before them stay.
    with_vip = [transport for transport in TRANSPORTS.values() if cluster.is_agent_up(transport)]
    began = now()
    cluster.set_ip_mode("Proxy")
    cluster.wait_for_agents(120)
    took = now() - began
    cluster.wait_for_logs(60)
    results = change_endpoints(cluster, "lb endpoints of another UDP Service change, load balancer", 1, 2)
    for result in results:
        result.expect(result.transport not in with_vip, "an agent was replaced with ipMode VIP")
        result.notes.append(f"no agent was replaced with ipMode VIP; all {took:.0f} s after Proxy was set")
    return results


def server_of_the_egress_selector_is_replaced(cluster):
    """11: a server of the overlay egress-selector under 20 calls/s for each node. 10: answers
    of a server that does not know the nodes yet."""
    cluster.use_egress_selector()
    calls = {edge: Calls(cluster.api, PODS[edge], 20) for edge in EDGES}
    time.sleep(3)
    cluster.restart(SERVERS)
    cluster.wait_for_servers(120)
    time.sleep(8)
    results = []
    for edge, transport in TRANSPORTS.items():
        result = Result("11 server of the egress selector is replaced", transport, "at most 1 s without service")
        outcomes = calls[edge].stop()
        result.count(outcomes)
        result.notes.append(f"{result.away:.1f} s without service")
        result.expect(result.away <= 1.1, "no service")
        results.append(result)
        early = [outcome for outcome in outcomes if "not a node with an agent" in (outcome.error or "")]
        result = Result("10 answers before the nodes are known", transport, "none says that the node is unknown")
        result.calls, result.failed = len(outcomes), len(early)
        result.expect(not early, "a node was said to be unknown")
        results.append(result)
    return results


ROWS = {
    "1": servers_are_replaced,
    "2": endpoints_of_another_service_change,
    "3": agents_are_replaced,
    "9": host_is_lost,
    # Last: they change the cluster.
    "lb": agents_dial_a_load_balancer,
    "hp": server_of_a_host_is_replaced,
    "11": server_of_the_egress_selector_is_replaced,
}
# Rows that fail until a change is made, with that change. They are shown, and fail nothing.
KNOWN = {
    "9 host of one of three servers is lost: DNS": "a third of the datagrams goes to the lost host; PreferSameNode avoids it",
}
