//! The rule for a request whose session was lost while the request waited for its answer.

use http::Method;
use http::header::UPGRADE;
use http::request::Parts;
use tunnel_proto::transport::StreamCut;

/// A request without a response, and how its stream ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct FailedRequest<'a> {
    /// The head of a request without a body, as it was sent to the target.
    pub(super) head: &'a Parts,
    /// The cut of the stream, if it was cut.
    pub(super) cut: Option<StreamCut>,
    /// The session is suspect or has ended.
    pub(super) is_suspect: bool,
    /// A byte of an answer arrived.
    pub(super) has_answer: bool,
    /// The request was already sent a second time.
    pub(super) is_resent: bool,
}

/// Returns whether a request may be sent once more over another session. The first target may have
/// served it, so the method must be safe (RFC 9110, section 9.2.1). An upgrade is not: `exec` of a
/// kubelet is a GET.
pub(super) fn can_resend(request: FailedRequest<'_>) -> bool {
    let is_lost = match request.cut {
        Some(StreamCut::SessionLost) => true,
        // A live session would have delivered a reply, so the agent or its target is slow.
        Some(StreamCut::ReplyTimeout) => request.is_suspect,
        // The agent or the target ended the stream.
        Some(
            StreamCut::Reset(_)
            | StreamCut::Stopped(_)
            | StreamCut::NoReply
            | StreamCut::ReaderStalled,
        )
        | None => false,
    };
    is_safe(request.head) && is_lost && !request.has_answer && !request.is_resent
}

/// Returns whether a target may serve a request without a body twice.
pub(super) fn is_safe(head: &Parts) -> bool {
    matches!(head.method, Method::GET | Method::HEAD) && !head.headers.contains_key(UPGRADE)
}

#[cfg(test)]
mod tests {
    use http::Request;
    use tunnel_proto::wire::code::ResetCode;

    use super::*;

    fn head(method: Method, upgrade: Option<&str>) -> Parts {
        let mut request = Request::builder().method(method).uri("/a");
        if let Some(protocol) = upgrade {
            request = request.header(UPGRADE, protocol);
        }
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn only_safe_requests_of_a_lost_session_are_sent_again() {
        let lost = Some(StreamCut::SessionLost);
        for (method, upgrade, expected) in [
            (Method::GET, None, true),
            (Method::HEAD, None, true),
            (Method::GET, Some("SPDY/3.1"), false),
            (Method::GET, Some("websocket"), false),
            (Method::OPTIONS, None, false),
            (Method::POST, None, false),
            (Method::PUT, None, false),
            (Method::DELETE, None, false),
        ] {
            let request = FailedRequest {
                head: &head(method.clone(), upgrade),
                cut: lost,
                is_suspect: true,
                has_answer: false,
                is_resent: false,
            };
            assert_eq!(can_resend(request), expected, "{method} {upgrade:?}");
        }
    }

    #[test]
    fn requests_are_sent_again_once_and_never_after_a_byte_of_an_answer() {
        let timeout = StreamCut::ReplyTimeout;
        for (cut, is_suspect, has_answer, is_resent, expected) in [
            (Some(StreamCut::SessionLost), true, false, false, true),
            (Some(StreamCut::SessionLost), false, false, false, true),
            (Some(timeout), true, false, false, true),
            (Some(timeout), false, false, false, false),
            (Some(StreamCut::SessionLost), true, true, false, false),
            (Some(StreamCut::SessionLost), true, false, true, false),
            (Some(timeout), true, false, true, false),
            (Some(StreamCut::NoReply), true, false, false, false),
            (
                Some(StreamCut::Reset(ResetCode::Dropped)),
                true,
                false,
                false,
                false,
            ),
            (
                Some(StreamCut::Stopped(ResetCode::Dropped)),
                true,
                false,
                false,
                false,
            ),
            (None, true, false, false, false),
        ] {
            let request = FailedRequest {
                head: &head(Method::GET, None),
                cut,
                is_suspect,
                has_answer,
                is_resent,
            };
            assert_eq!(can_resend(request), expected, "{request:?}");
        }
    }
}
