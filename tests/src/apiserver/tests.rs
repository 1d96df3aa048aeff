//! The stand-in against the real kubectl is in the scenarios; here is what kubectl does not do.
