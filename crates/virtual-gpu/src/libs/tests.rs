//! The libraries as a C program sees them: handles, launches, workspaces, refusals.

use super::testing::{input, output};
use super::{Library, close, compute};
use crate::constants as c;
use crate::gpu::{self, contents, memory};
use crate::stubs;
use core::ffi::c_void;
use core::ptr::null_mut;

fn blas() -> *mut c_void {
    let mut handle = null_mut();
    assert_eq!(stubs::cublasCreate_v2(output(&mut handle)), c::CUBLAS_STATUS_SUCCESS);
    handle
}

#[test]
fn maths_is_a_launch_on_the_handle() {
    let handle = blas();
    let before = gpu::launches();
    assert_eq!(compute(Library::Blas, handle), 0);
    // Other tests may launch at the same time.
    assert!(gpu::launches() > before);
    assert_eq!(stubs::cublasDestroy_v2(handle), 0);
    assert_eq!(compute(Library::Blas, handle), c::CUBLAS_STATUS_NOT_INITIALIZED, "stale");
}

#[test]
fn a_handle_belongs_to_its_library() {
    let handle = blas();
    assert_eq!(compute(Library::Solver, handle), c::CUSOLVER_STATUS_NOT_INITIALIZED);
    assert_eq!(compute(Library::Blas, null_mut()), c::CUBLAS_STATUS_NOT_INITIALIZED);
    assert_eq!(close(Library::Blas, handle), 0);
    let status = stubs::cublasCreate_v2(output(&mut *Box::new(0usize)));
    assert_eq!(status, 0, "any place for a handle will do");
}

#[test]
fn a_stream_that_is_none_is_refused_at_the_launch() {
    let handle = blas();
    let stranger = core::ptr::without_provenance_mut(0x1230);
    assert_eq!(stubs::cublasSetStream_v2(handle, stranger), 0);
    assert_eq!(compute(Library::Blas, handle), c::CUBLAS_STATUS_EXECUTION_FAILED);
    let mut stream = 0u64;
    assert_eq!(stubs::cublasGetStream_v2(handle, output(&mut stream)), 0);
    assert_eq!(stream, 0x1230);
}

#[test]
fn results_on_the_host_are_written() {
    let handle = blas();
    let mut norm = 7f32;
    let vector = null_mut();
    assert_eq!(stubs::cublasSnrm2_v2(handle, 4, vector, 1, output(&mut norm)), 0);
    assert_eq!(norm.to_bits(), 0);
}

#[test]
fn workspace_queries_write_their_model() {
    let mut size = -1i32;
    let none = null_mut();
    let status =
        stubs::cusolverDnDsyevd_bufferSize(none, 1, 0, 10, none, 10, none, output(&mut size));
    assert_eq!((status, size), (0, 261));
    let mut bytes = -1i64;
    assert_eq!((stubs::cudnnGraphVersionCheck(), stubs::cudnnOpsVersionCheck()), (0, 0));
    assert_eq!(stubs::cudnnDropoutGetStatesSize(none, output(&mut bytes)), 0);
    assert!(bytes > 1 << 20);
}

#[test]
fn objects_are_taken_back_once() {
    let mut object = null_mut();
    assert_eq!(stubs::cudnnCreateDropoutDescriptor(output(&mut object)), 0);
    assert_eq!(stubs::cudnnDestroyDropoutDescriptor(object), 0);
    assert_eq!(stubs::cudnnDestroyDropoutDescriptor(object), c::CUDNN_STATUS_BAD_PARAM);
    assert_eq!(stubs::cudnnDestroyDropoutDescriptor(null_mut()), 0);
}

/// Each API has its own way of saying no.
#[test]
fn what_is_not_supported_says_so_in_its_own_words() {
    for (answer, expected) in [
        (stubs::cublasSrotg_v2(), c::CUBLAS_STATUS_NOT_SUPPORTED),
        (stubs::cudnnGetConvolution2dDescriptor(), c::CUDNN_STATUS_NOT_SUPPORTED),
        (stubs::cufftXtMalloc(), c::CUFFT_NOT_SUPPORTED),
        (stubs::cusolverDnIRSParamsCreate(), c::CUSOLVER_STATUS_NOT_SUPPORTED),
        (stubs::cusparseGather(), c::CUSPARSE_STATUS_NOT_SUPPORTED),
        (stubs::ncclCommSuspend(), c::ncclInvalidUsage),
        (stubs::cuptiMetricGetValue(), c::CUPTI_ERROR_NOT_SUPPORTED),
        (stubs::nvrtcGetLTOIR(), c::NVRTC_ERROR_INTERNAL_ERROR),
        (stubs::cuFileRead(), -1),
        (stubs::nvshmem_team_n_pes(), -1),
    ] {
        assert_eq!(answer, i64::from(expected));
    }
    assert_eq!(stubs::cuFileHandleRegister(), i64::from(c::CU_FILE_PLATFORM_NOT_SUPPORTED));
    assert_eq!(stubs::nvshmem_malloc(), 0, "no memory");
}

/// A communicator of `ranks`, of which this is `rank`.
fn communicator(ranks: i32, rank: i32) -> *mut c_void {
    let mut comm = null_mut();
    let id = super::nccl::unique_id();
    let status = super::nccl::ncclCommInitRank(output(&mut comm), ranks, id, rank);
    assert_eq!(status, c::ncclSuccess);
    comm
}

#[test]
fn collectives_act_as_if_all_ranks_held_the_same() {
    use super::nccl::collective::*;
    use super::nccl::group::{ncclGroupEnd, ncclGroupStart};
    let comm = communicator(4, 1);
    let buffer = memory::alloc(0, 4 << 20).expect("room");
    let (from, to) = (buffer, buffer + (2 << 20));
    let bytes = |values: &[i32]| values.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<u8>>();
    let read = |count: usize| contents::read(to, count * 4);

    contents::write(from, &bytes(&[1, 2, 3, 4]));
    assert_eq!(ncclAllReduce(from, to, 4, c::ncclInt32, c::ncclSum, comm, 0), 0);
    assert_eq!(read(4), Some(bytes(&[4, 8, 12, 16])));
    assert_eq!(ncclAllGather(from, to, 1, c::ncclInt32, comm, 0), 0);
    assert_eq!(read(4), Some(bytes(&[1, 1, 1, 1])));
    assert_eq!(ncclReduceScatter(from, to, 1, c::ncclInt32, c::ncclMax, comm, 0), 0);
    assert_eq!(read(1), Some(bytes(&[2])), "this rank's part");
    assert_eq!(ncclAlltoAll(from, to, 1, c::ncclInt32, comm, 0), 0);
    assert_eq!(read(4), Some(bytes(&[2, 2, 2, 2])), "what each rank has for this one");

    // A gather into a list: a broadcast from each rank in turn, all in one group.
    contents::write(from, &bytes(&[9]));
    assert_eq!(ncclGroupStart(), 0);
    for root in 0..4 {
        let place = to + root as u64 * 4;
        assert_eq!(ncclBroadcast(from, place, 1, c::ncclInt32, root, comm, 0), 0);
    }
    assert_eq!(ncclGroupEnd(), 0);
    assert_eq!(read(4), Some(bytes(&[9, 9, 9, 9])));
    assert_eq!(ncclGroupEnd(), c::ncclInvalidUsage);

    // What a peer sends that this rank knows nothing about is not known.
    assert_eq!(ncclRecv(to, 4, c::ncclInt32, 0, comm, 0), 0);
    assert_eq!(read(4), None);
    memory::free(buffer).expect("freed");
}

#[test]
fn an_algorithm_keeps_its_configuration() {
    use super::blaslt::*;
    let mut algorithm = [0u64; 8];
    let none = null_mut();
    let place = output(&mut algorithm);
    assert_eq!(cublasLtMatmulAlgoInit(none, 0, 0, 0, 0, 0, 0, 3, place), 0);
    let tile = c::CUBLASLT_ALGO_CONFIG_TILE_ID;
    assert_eq!(cublasLtMatmulAlgoConfigSetAttribute(place, tile, input(&18i32), 4), 0);
    let (mut value, mut written) = (0i32, 0usize);
    let mut get = |attribute, room| {
        let to = (output(&mut value), output(&mut written));
        (
            cublasLtMatmulAlgoConfigGetAttribute(input(&algorithm), attribute, to.0, room, to.1),
            value,
        )
    };
    assert_eq!(get(tile, 4), (0, 18));
    assert_eq!(get(c::CUBLASLT_ALGO_CONFIG_ID, 4), (0, 3));
    assert_eq!(get(tile, 2).0, c::CUBLAS_STATUS_INVALID_VALUE, "too little room");
    assert_eq!(get(99, 4).0, c::CUBLAS_STATUS_INVALID_VALUE);
    let stranger = [0u64; 8];
    let status = cublasLtMatmulAlgoConfigGetAttribute(
        input(&stranger),
        tile,
        output(&mut value),
        4,
        place.cast(),
    );
    assert_eq!(status, c::CUBLAS_STATUS_INVALID_VALUE);
}
