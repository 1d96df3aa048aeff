//! Seeds and their random mutations.

/// Requests of ordinary callers and of attackers.
pub(super) const REQUESTS: &[&str] = &[
    "GET /metrics HTTP/1.1\r\nHost: worker-1:9100\r\n\r\n",
    "GET /metrics?a=b HTTP/1.1\r\nHost: WORKER-2.:9100\r\nUser-Agent: Prometheus/3.0\r\nAccept-Encoding: gzip\r\n\r\n",
    "GET /a HTTP/1.0\r\nHost: worker-1:9100\r\n\r\n",
    "GET /a HTTP/1.1\r\nHost: 192.0.2.1:9100\r\nX-Tunnel-Proxy-Host: worker-2\r\n\r\n",
    "GET /a HTTP/1.1\r\nHost: 192.0.2.9:9100\r\nX-Tunnel-Proxy-Dest: worker-2:9100\r\n\r\n",
    "POST /u HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 5\r\n\r\nhello",
    "POST /u HTTP/1.1\r\nHost: worker-1:9100\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
    "PUT /u HTTP/1.1\r\nHost: worker-1:9100\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "GET /u HTTP/1.1\r\nHost: worker-1:9100\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\nTE: trailers\r\n\r\n\
     5;x=\"y\"\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n",
    "POST /u HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG",
    "GET /1 HTTP/1.1\r\nHost: worker-1:9100\r\n\r\nGET /2 HTTP/1.1\r\nHost: worker-2:9100\r\n\r\n",
    "POST /1 HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 52\r\n\r\n\
     GET /2 HTTP/1.1\r\nHost: worker-2:9100\r\nX: 123456\r\n\r\n",
    "HEAD /h HTTP/1.1\r\nHost: worker-1:9100\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n\r\n",
    "OPTIONS /o HTTP/1.1\r\nHost: worker-1:9100\r\nCookie: a\r\nCookie: b\r\nAuthorization: Bearer t\r\n\r\n",
];

/// Upgrades of kubectl's clients, some followed by a further request.
pub(super) const UPGRADES: &[&str] = &[
    "POST /exec/a/b/c HTTP/1.1\r\nHost: worker-1:9100\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
     X-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Length: 0\r\n\r\n",
    "GET /exec/a/b/c HTTP/1.1\r\nHost: worker-1:9100\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
     Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    "GET /e HTTP/1.1\r\nHost: worker-1:9100\r\nConnection: Upgrade\r\nUpgrade: websocket, SPDY/3.1\r\n\r\n\
     GET /secret HTTP/1.1\r\nHost: worker-2:9100\r\n\r\n",
    "GET /e HTTP/1.1\r\nHost: worker-1:9100\r\nUpgrade: h2c\r\n\r\n",
    "GET /e HTTP/1.1\r\nHost: worker-1:9100\r\nConnection: close\r\nConnection: upgrade\r\nUpgrade: a\r\nUpgrade: b\r\n\r\n",
    "GET /plain HTTP/1.1\r\nHost: worker-1:9100\r\n\r\n",
];

/// Responses to the upgrades.
pub(super) const ANSWERS: &[&str] = &[
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\nbytes",
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
     Sec-WebSocket-Accept: HSmrc0sMlYUkAGmm5OPpG2HaGWk=\r\n\r\n",
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n\
     HTTP/1.1 101 Switching Protocols\r\nUpgrade: b\r\n\r\n",
    "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    "HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\nX-Tunnel-Error: ok\r\nKeep-Alive: timeout=5\r\n\r\nno",
    "HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n2\r\nno\r\n0\r\nX-Sum: 1\r\n\r\n",
    "HTTP/1.0 404 Not Found\r\nUpgrade: SPDY/3.1\r\n\r\nno such pod",
    "HTTP/1.1 400 Bad\r\nContent-Length: 2\r\nContent-Length: 2\r\nConnection: X-A\r\nX-A: 1\r\n\r\nno",
];

/// Words that have a meaning for parsers.
const TOKENS: &[&str] = &[
    "\r\n",
    "\n",
    "\r",
    "\r\n\r\n",
    " ",
    "\t",
    "\0",
    ":",
    ",",
    ";",
    "0",
    "1",
    "5",
    "ffffffffffffffff",
    "-1",
    "+",
    "Host: worker-2:9100\r\n",
    "Content-Length: 3\r\n",
    "Content-Length: 0\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: gzip, chunked\r\n",
    "Transfer-Encoding: identity\r\n",
    "Connection: close\r\n",
    "Connection: Upgrade\r\n",
    "Connection: Host, Content-Length\r\n",
    "Upgrade: SPDY/3.1\r\n",
    "X-Tunnel-Proxy-Host: worker-2\r\n",
    "X-Tunnel-Proxy-Dest: worker-2:9100\r\n",
    "TE: trailers\r\n",
    "Expect: 100-continue\r\n",
    "GET /smuggled HTTP/1.1\r\nHost: worker-2:9100\r\n\r\n",
    "0\r\n\r\n",
    " HTTP/1.0",
    "http://worker-2:9100/",
    "CONNECT",
    "\u{ff}",
    "%0d%0a",
    "#",
    "?",
    "*",
    "101",
    "200",
    "websocket",
    "worker-2",
];

/// A seeded generator of mutated seeds.
pub(super) struct Mutator(u64);

impl Mutator {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns a seed with up to four mutations.
    pub(super) fn mutate(&mut self, seeds: &[&str]) -> Vec<u8> {
        let mut bytes = self.pick(seeds).as_bytes().to_vec();
        for _ in 0..self.below(5) {
            self.change(&mut bytes, seeds);
        }
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, seeds: &[&str]) {
        let at = self.below(bytes.len() + 1);
        let end = (at + self.below(12)).min(bytes.len());
        match self.below(7) {
            0 if at < bytes.len() => bytes[at] = self.next().to_le_bytes()[0],
            1 => drop(bytes.drain(at..end)),
            2 => {
                let copied = bytes[at..end].to_vec();
                bytes.splice(at..at, copied);
            }
            3 => {
                let other = self.pick(seeds).as_bytes();
                let from = self.below(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            4 => {
                // A whole line, at the start of a line.
                let lines = bytes
                    .windows(2)
                    .enumerate()
                    .filter(|(_, two)| two == b"\r\n");
                let starts: Vec<_> = lines.map(|(start, _)| start + 2).collect();
                if !starts.is_empty() {
                    let start = starts[self.below(starts.len())];
                    let word = self.pick(TOKENS).as_bytes().to_vec();
                    bytes.splice(start..start, word);
                }
            }
            _ => {
                let word = self.pick(TOKENS).as_bytes().to_vec();
                bytes.splice(at..at, word);
            }
        }
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() >> 33).unwrap() % bound.max(1)
    }

    /// Returns the next number of the xorshift64* generator.
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
