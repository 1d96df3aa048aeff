//! What the data directory has, and what it must have. The writes between the two are in an order in
//! which a pair that stays is on disk at each moment, in its old or its new files.

use rustls_pki_types::CertificateDer;

/// The pairs of certificates and roots that a directory has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskContent {
    pub(crate) current: StoredPair,
    pub(crate) previous: Option<StoredPair>,
}

/// A chain, leaf first, and the roots that were issued with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredPair {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) roots: Vec<CertificateDer<'static>>,
}

/// The content of a directory as far as it is known.
#[derive(Debug)]
pub(crate) struct OnDisk {
    content: DiskContent,
    /// Whether the last write ended well. Otherwise any file may be old.
    is_complete: bool,
}

/// A pair of files to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskWrite {
    Current,
    Previous,
}

impl OnDisk {
    pub(crate) fn complete(content: DiskContent) -> Self {
        Self {
            content,
            is_complete: true,
        }
    }

    /// Returns the writes that give the directory this content.
    pub(crate) fn writes(&self, wanted: &DiskContent) -> Vec<DiskWrite> {
        let returns = self.content.previous.as_ref() == Some(&wanted.current);
        let order = if returns || wanted.previous.is_none() {
            [DiskWrite::Current, DiskWrite::Previous]
        } else {
            [DiskWrite::Previous, DiskWrite::Current]
        };
        let is_missing = |write: &DiskWrite| {
            let has = match write {
                DiskWrite::Current => self.content.current == wanted.current,
                DiskWrite::Previous => self.content.previous == wanted.previous,
            };
            !(has && self.is_complete)
        };
        order.into_iter().filter(is_missing).collect()
    }

    /// Records that a write begins. If it fails, any file may be old.
    pub(crate) fn begin_write(&mut self) {
        self.is_complete = false;
    }
}

#[cfg(test)]
mod tests {
    use super::DiskWrite::{Current, Previous};
    use super::*;

    fn pair(name: u8) -> StoredPair {
        StoredPair {
            chain: vec![vec![name].into()],
            roots: Vec::new(),
        }
    }

    fn content(current: u8, previous: Option<u8>) -> DiskContent {
        DiskContent {
            current: pair(current),
            previous: previous.map(pair),
        }
    }

    #[test]
    fn pair_that_stays_is_written_before_its_old_files_are_replaced() {
        for (from, to, expected) in [
            (content(1, None), content(1, None), &[][..]),
            (content(1, None), content(2, Some(1)), &[Previous, Current]),
            (content(2, Some(1)), content(3, Some(1)), &[Current]),
            (content(2, Some(1)), content(2, None), &[Previous]),
            (content(2, Some(1)), content(1, None), &[Current, Previous]),
            (
                content(2, Some(1)),
                content(1, Some(2)),
                &[Current, Previous],
            ),
        ] {
            let mut on_disk = OnDisk::complete(from);
            assert_eq!(on_disk.writes(&to), expected, "{to:?}");
            on_disk.begin_write();
            assert_eq!(on_disk.writes(&to).len(), 2);
        }
    }
}
