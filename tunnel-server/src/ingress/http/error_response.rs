//! The HTTP responses for failures on the listeners.

use http::{HeaderValue, Response};
use hyper::ext::ReasonPhrase;
use tunnel_proto::wire::header::one_line;

use crate::ingress::error::ProxyError;
use crate::ingress::http::body::ResponseBody;
use crate::ingress::http::headers::ERROR_HEADER;
use crate::ingress::outcome::Outcome;

/// Seconds after which a caller can retry when the agent is full.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Authentication challenge of CONNECT listeners (RFC 7617, section 2).
const CHALLENGE: HeaderValue = HeaderValue::from_static("Basic realm=\"tunnel-server\"");

/// Longest reason phrase in a status line, in bytes.
const REASON_MAX_BYTES: usize = 512;

impl ProxyError {
    /// Returns the HTTP response for this failure.
    #[must_use]
    pub fn response(&self) -> Response<ResponseBody> {
        let mut response = Response::new(ResponseBody::text(format!("{}\n", one_line(&self.text))));
        *response.status_mut() = self.outcome.status();
        let headers = response.headers_mut();
        headers.insert(ERROR_HEADER, HeaderValue::from_static(self.outcome.label()));
        headers.insert(
            http::header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        match self.outcome {
            Outcome::TooManyStreams => {
                headers.insert(http::header::RETRY_AFTER, RETRY_AFTER);
            }
            // The end of such a request can be ambiguous, so the server does not read a further
            // request from the connection.
            Outcome::BadRequest => {
                headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
            }
            Outcome::ProxyAuth => {
                headers.insert(http::header::PROXY_AUTHENTICATE, CHALLENGE);
                // A caller without valid credentials must open a new connection for each guess.
                headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }

    /// Returns the response to a CONNECT. The status line contains the text too, because
    /// kube-apiserver shows no other part of the response.
    #[must_use]
    pub fn connect_response(&self) -> Response<ResponseBody> {
        let mut response = self.response();
        let mut reason = one_line(&self.text).into_bytes();
        reason.truncate(REASON_MAX_BYTES);
        if let Ok(reason) = ReasonPhrase::try_from(reason) {
            response.extensions_mut().insert(reason);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::registry::{OpenError, QuotaExhausted, StreamQuota, SuspectReason};

    #[test]
    fn agent_that_may_be_gone_and_a_full_pool_are_503() {
        let answer = |error| {
            let failure = ProxyError::from_open(&error, "worker-1 node:9100");
            assert!(failure.text.starts_with("worker-1 node:9100: "));
            let response = failure.response();
            let code = response.headers()[ERROR_HEADER]
                .to_str()
                .unwrap()
                .to_owned();
            let retry = response.headers().contains_key(http::header::RETRY_AFTER);
            (response.status().as_u16(), code, retry)
        };
        let suspect = OpenError::Suspect(SuspectReason::PeerHearsNothing);
        assert_eq!(answer(suspect), (503, "no_agent".into(), false));
        let full = OpenError::BufferPoolFull(1 << 20);
        assert_eq!(answer(full), (503, "too_many_streams".into(), true));
        let busy = OpenError::TooManyStreams(QuotaExhausted {
            quota: StreamQuota::UnverifiedCaller,
            streams: 128,
        });
        assert_eq!(answer(busy), (503, "too_many_streams".into(), true));
    }
}
