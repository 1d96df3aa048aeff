//! Sizes of the futures of a request. Every one of them is copied into the one that waits for it, so
//! what few requests need is boxed.

use crate::ingress::http::conn::HttpConn;
use crate::ingress::http::upstream::UpstreamRequest;
use crate::ingress::http::upstream::connection::Upstream;

fn of3<A, B, C, F: Future>(_: impl FnOnce(A, B, C) -> F) -> usize {
    size_of::<F>()
}

fn of4<A, B, C, D, F: Future>(_: impl FnOnce(A, B, C, D) -> F) -> usize {
    size_of::<F>()
}

#[test]
fn futures_of_a_request_are_small() {
    let sizes = [
        (
            "answer",
            of4(|conn: &'static HttpConn, request, guard, head_error| {
                conn.answer(request, guard, head_error)
            }),
            4096,
        ),
        (
            "exchange",
            of3(
                |upstream: &'static UpstreamRequest<'static>, request, record: &'static mut _| {
                    upstream.exchange(request, record)
                },
            ),
            3072,
        ),
        ("upstream", size_of::<Upstream>(), 256),
    ];
    let large = sizes.iter().filter(|(_, size, limit)| size > limit);
    assert_eq!(large.collect::<Vec<_>>(), Vec::<&_>::new(), "{sizes:?}");
}
