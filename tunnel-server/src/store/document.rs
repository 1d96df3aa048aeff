//! Documents that several processes read and change: a file of the data directory, or a key of a Secret that all servers of
//! a cluster share.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::data_dir::{FileStamp, SharedFile};

#[cfg(feature = "kubernetes")]
pub(crate) use crate::store::cluster_document::{
    CasOutcome, ClusterDocument, CompareAndSwap, Snapshot,
};

/// A JSON document that is kept in memory and that others may change.
#[derive(Debug)]
pub(crate) enum SharedDocument {
    /// A file that verbs change while no server runs.
    File(SharedFile),
    /// A key of a Secret that other servers change.
    #[cfg(feature = "kubernetes")]
    Cluster(ClusterDocument),
}

/// What tells one state of a document from the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DocumentVersion {
    File(FileStamp),
    /// Counts what this process heard.
    #[cfg(feature = "kubernetes")]
    Snapshot(u64),
}

impl SharedDocument {
    /// What it is called where it cannot be used.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::File(file) => file.path().display().to_string(),
            #[cfg(feature = "kubernetes")]
            Self::Cluster(doc) => doc.name().to_owned(),
        }
    }

    /// The version as it is; `None` when there is no document.
    pub(crate) fn version(&self) -> Option<DocumentVersion> {
        match self {
            Self::File(file) => file.stamp().map(DocumentVersion::File),
            #[cfg(feature = "kubernetes")]
            Self::Cluster(doc) => doc.version().map(DocumentVersion::Snapshot),
        }
    }

    /// The content, parsed; `None` when there is none.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        match self {
            Self::File(file) => file.read(),
            #[cfg(feature = "kubernetes")]
            Self::Cluster(doc) => doc.read(),
        }
    }

    /// Replaces the content by what `merge` makes of the one that is there; where others write at the same time it is
    /// called again with theirs. Says what version that is. Blocks the thread: for a disk, or 10 s at most for a cluster.
    pub(crate) fn change<T: DeserializeOwned, U: Serialize>(
        &self,
        mut merge: impl FnMut(Option<T>) -> io::Result<U>,
    ) -> io::Result<Option<DocumentVersion>> {
        match self {
            Self::File(file) => {
                let _changing = file.lock()?;
                let theirs = file.read()?;
                file.write(&merge(theirs)?)?;
                Ok(file.stamp().map(DocumentVersion::File))
            }
            #[cfg(feature = "kubernetes")]
            Self::Cluster(doc) => doc
                .change(merge)
                .map(|sequence| Some(DocumentVersion::Snapshot(sequence))),
        }
    }
}
