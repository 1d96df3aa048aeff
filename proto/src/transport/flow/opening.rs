//! What both transports do to open a stream.

use std::sync::Arc;

use bytes::BytesMut;

use super::{ReadMonitor, SessionFlow};
use crate::transport::SessionError;
use crate::wire::header::{StreamHeader, StreamKind};

impl SessionFlow {
    /// Returns the monitor of a stream that this end opens, and its framed header. May wait,
    /// see [`SessionFlow::open_or_wait`]. Cancel-safe.
    pub(in crate::transport) async fn open_with(
        &self,
        header: &StreamHeader,
    ) -> Result<(Arc<ReadMonitor>, BytesMut), SessionError> {
        let read_monitor = match header.kind {
            // Always read, and part of the session's base window.
            StreamKind::Control { .. } => Arc::default(),
            StreamKind::Target(_)
            | StreamKind::Cloud(_)
            | StreamKind::Forward { .. }
            | StreamKind::Enroll => {
                let opened = self.open_or_wait(header.source).await;
                opened.ok_or(SessionError::NoRoom)?
            }
        };
        let mut framed = BytesMut::new();
        header
            .encode_as(header.is_late || read_monitor.is_late(), &mut framed)
            .map_err(|error| SessionError::Header(Arc::new(error)))?;
        Ok((read_monitor, framed))
    }
}
