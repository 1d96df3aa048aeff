//! Documents that several processes read and change: a file of the data directory, or a key of a
//! Secret that all servers of a cluster share.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::data_dir::{FileStamp, SharedFile};

pub(crate) use crate::store::cluster_document::{
    CasOutcome, ClusterDocument, CompareAndSwap, ObservedContent,
};

/// A JSON document that is cached in memory and that other processes may change.
#[derive(Debug)]
pub(crate) enum SharedDocument {
    /// A file that commands change while no server runs.
    File(SharedFile),
    /// A key of a Secret that other servers change.
    Cluster(ClusterDocument),
}

/// A value that distinguishes one state of a document from the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DocumentVersion {
    File(FileStamp),
    /// Sequence number of an observation in this process.
    Observed(u64),
}

impl SharedDocument {
    /// Returns the document's name for error messages.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::File(file) => file.path().display().to_string(),
            Self::Cluster(doc) => doc.name().to_owned(),
        }
    }

    /// Returns the current version, or `None` if there is no document.
    pub(crate) fn version(&self) -> Option<DocumentVersion> {
        match self {
            Self::File(file) => file.stamp().map(DocumentVersion::File),
            Self::Cluster(doc) => doc.version().map(DocumentVersion::Observed),
        }
    }

    /// Returns the parsed content, or `None` if there is no document.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        match self {
            Self::File(file) => file.read(),
            Self::Cluster(doc) => doc.read(),
        }
    }

    /// Replaces the content with the result of `merge`, which receives the current content. On a
    /// conflict `merge` is called again with the content of the other writer. Returns the new
    /// version. Blocks the thread: for a disk write, or for at most 10 s in a cluster.
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
            Self::Cluster(doc) => doc
                .change(merge)
                .map(|sequence| Some(DocumentVersion::Observed(sequence))),
        }
    }
}
