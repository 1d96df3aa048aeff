//! Label sets of the server's metrics.

use tunnel_proto::process::metrics::StaticLabel;

use crate::config::Limit;
use crate::ingress::outcome::Outcome;

tunnel_proto::label_sets! {
    pub(super)
    TransportLabel { transport: StaticLabel }
    CodeLabel { code: StaticLabel }
    OutcomeLabel { result: Outcome }
    DirectionLabel { direction: StaticLabel }
    ResultLabel { result: StaticLabel }
    ReloadLabel { files: StaticLabel, result: StaticLabel }
    FilesLabel { files: StaticLabel }
    LimitLabel { limit: Limit }
}
