#!/usr/bin/env python3
"""Writes the facts about NVIDIA's public APIs that the virtual GPU is built from.

    pip install libclang
    scripts/gen_cuda_api.py --headers 13.2=DIR[:DIR...] --headers 12.4=DIR[:DIR...] \\
        --torch 2.15=SITE/torch/lib --torch 2.11=... --torch 2.6=... --out crates/virtual-gpu/api

DIR is an include folder of NVIDIA's wheels (nvidia-cuda-runtime, -cublas, -cudnn, -cufft,
-cusolver, -cusparse, -cusparselt, -nccl, -cuda-nvrtc, -cuda-cupti, -cufile, -nvshmem,
-nvml-dev, and -cuda-nvcc or -cuda-crt for the `crt/` headers). Give the oldest toolkit
first or last: the order doesn't matter.

It writes, sorted, one record a line, fields parted by tabs:
  prototypes.tsv       symbol, library, toolkits, return type, parameters
  imports.tsv          symbol, library, versions of torch whose libraries need it or look it up
  layouts.tsv          toolkit, record, field ("" for the whole), offset, size
  constants.tsv        name, value: the enumerators that the library answers with or is asked for
  driver_versions.tsv  name, CUDA version, symbol, symbol for per-thread default streams

Only facts are taken (names, types, numbers), never text; the files are small enough to review. A
parameter is written `name:abi:type`, where abi is what a caller passes: i32, i64, f32, f64, ptr, a
pointer to N writable bytes (ptr[N]), or a record of N bytes (rec[N], or recf[N] if it travels in
floating-point registers).
"""
import argparse
import glob
import os
import re
import subprocess
import sys
from collections import defaultdict

try:
    from clang.cindex import Config, CursorKind, Index, TranslationUnit, TypeKind  # noqa: F401
except ImportError:
    sys.exit("gen_cuda_api.py needs libclang: pip install libclang")

# The header of a declaration says which library answers it. First match wins.
LIBRARIES = [
    (r"cuda\.h|cudaGL\.h|cudaEGL\.h|cudaVDPAU\.h|cudaProfiler\.h", "cuda"),
    (r"cuda_runtime_api\.h|cuda_profiler_api\.h|host_runtime\.h|cuda_device_runtime_api\.h|cuda_.*interop\.h", "cudart"),
    (r"cublasLt\.h", "cublasLt"),
    (r"cublas.*\.h", "cublas"),
    (r"cudnn.*\.h", "cudnn"),
    (r"cufft.*\.h", "cufft"),
    (r"cusolver.*\.h", "cusolver"),
    (r"cusparseLt\.h", "cusparseLt"),
    (r"cusparse.*\.h", "cusparse"),
    (r"nccl\.h", "nccl"),
    (r"nvrtc\.h", "nvrtc"),
    (r"cupti.*\.h", "cupti"),
    (r"cufile\.h", "cufile"),
    (r"nvml\.h", "nvml"),
    (r".*nvshmem.*\.h|bootstrap_.*\.h", "nvshmem"),
]
# One translation unit each: some of these can't be included together.
UNITS = [
    ("c", ["cuda.h", "cuda_runtime_api.h", "cudaProfiler.h", "cuda_profiler_api.h"]),
    ("c", ["cublas_v2.h", "cublasLt.h"]),
    ("c", ["cudnn.h"]),
    ("c", ["cufft.h", "cufftXt.h"]),
    ("c", ["cusolverDn.h", "cusolverSp.h"]),
    ("c", ["cusparse.h"]),
    ("c++", ["cusparseLt.h"]),
    ("c", ["nccl.h"]),
    ("c", ["nvrtc.h"]),
    ("c", ["cupti.h"]),
    ("c", ["cufile.h"]),
    ("c", ["nvml.h"]),
    ("c++", ["nvshmem_host.h"]),
]
# The driver and the runtime have more than one ABI of a name, chosen by macros of the header.
VARIANTS = [[], ["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"], ["-D__CUDA_API_VERSION_INTERNAL"]]
# Whole APIs; of the other libraries only what torch imports is kept.
WHOLE = {"cuda", "cudart", "nvml", "cublas", "cublasLt", "cudnn", "cufft", "cusolver", "cusparse", "cusparseLt", "nccl", "nvrtc", "cupti"}

# Records that the crate writes or reads field by field.
RECORDS = """
cudaDeviceProp cudaPointerAttributes cudaFuncAttributes cudaLaunchConfig_st cudaMemPoolProps
cudaMemLocation cudaExtent cudaPitchedPtr cudaPos cudaMemcpy3DParms cudaMemcpy3DPeerParms
cudaIpcMemHandle_st cudaIpcEventHandle_st cudaGraphNodeParams cudaConditionalNodeParams
cudaKernelNodeParams cudaKernelNodeParamsV2 cudaMemsetParams cudaMemsetParamsV2 cudaHostNodeParams
cudaMemcpyNodeParams cudaGraphInstantiateParams_st cudaGraphEdgeData_st cudaLaunchAttribute_st
cudaMemAccessDesc cudaMemPoolPtrExportData cudaExternalMemoryHandleDesc cudaExternalMemoryBufferDesc
cudaExternalSemaphoreHandleDesc cudaChannelFormatDesc cudaMemcpyAttributes cudaMemcpy3DBatchOp
cudaGraphExecUpdateResultInfo_st cudaStreamAttrValue cudaResourceDesc cudaTextureDesc
CUmemAllocationProp_st CUmemLocation_st CUmemAccessDesc_st CUmemPoolProps_st CUlaunchConfig_st
CUlaunchAttribute_st CUctxCreateParams_st CUexecAffinityParam_st CUuuid_st CUDA_MEMCPY2D_st
CUDA_MEMCPY3D_st CUDA_MEMCPY3D_PEER_st CUDA_ARRAY_DESCRIPTOR_st CUDA_ARRAY3D_DESCRIPTOR_st
CUtensorMap_st CUDA_KERNEL_NODE_PARAMS_st CUDA_KERNEL_NODE_PARAMS_v2_st CUDA_MEMSET_NODE_PARAMS_st
CUDA_HOST_NODE_PARAMS_st CUmulticastObjectProp_st CUstreamBatchMemOpParams_union CUdevprop_st
CUipcMemHandle_st CUipcEventHandle_st CUgraphNodeParams_st
cublasLtMatmulHeuristicResult_t cublasLtMatmulAlgo_t cublasLtMatmulDescOpaque_t
cublasLtMatrixLayoutOpaque_t cublasLtMatmulPreferenceOpaque_t cublasLtMatrixTransformDescOpaque_t
cudnnFractionStruct cudnnConvolutionFwdAlgoPerfStruct cudnnConvolutionBwdDataAlgoPerfStruct
cudnnConvolutionBwdFilterAlgoPerfStruct cusparseLtHandle_t cusparseLtMatDescriptor_t cusparseLtMatmulDescriptor_t
cusparseLtMatmulAlgSelection_t cusparseLtMatmulPlan_t
ncclConfig_v23000 ncclConfig_v21700 ncclConfig_v22200 ncclConfig_v22700 ncclConfig_t ncclUniqueId ncclSimInfo_v22200
nvmlMemory_st nvmlMemory_v2_st nvmlPciInfo_st nvmlPciInfoExt_v1_st nvmlUtilization_st nvmlGpuFabricInfo_t
nvmlGpuFabricInfo_v2_t nvmlGpuFabricInfo_v3_t nvmlProcessInfo_st nvmlProcessInfo_v2_st nvmlBAR1Memory_st
nvmlFieldValue_st nvmlEccErrorCounts_st
cufftXtCallbackType_enum CUfileError CUfileDescr_t
""".split()
# Enumerations whose values the crate needs by name.
ENUMS = """
cudaError cudaError_enum cudaDeviceAttr CUdevice_attribute_enum cudaMemoryType cudaMemcpyKind
cudaMemPoolAttr CUmemPool_attribute_enum cudaFuncAttribute CUfunction_attribute_enum cudaLimit CUlimit_enum
CUpointer_attribute_enum cudaGraphNodeType CUgraphNodeType_enum cudaStreamCaptureStatus
cudaStreamCaptureMode CUmemLocationType_enum cudaMemLocationType cudaMemAllocationType
CUmemAllocationHandleType_enum CUmemAllocationGranularity_flags_enum cudaDeviceP2PAttr
CUdevice_P2PAttribute_enum CUdriverProcAddress_flags_enum CUdriverProcAddressQueryResult_enum
cudaDriverEntryPointQueryResult cudaLaunchAttributeID CUlaunchAttributeID_enum cudaGraphMemAttributeType
cudaGraphConditionalNodeType cudaDataType_t libraryPropertyType_t cudaGraphExecUpdateResult
cudaFlushGPUDirectRDMAWritesOptions cudaMemRangeAttribute cudaStreamUpdateCaptureDependenciesFlags
cublasStatus_t cublasMath_t cublasPointerMode_t cublasAtomicsMode_t cublasComputeType_t
cublasLtMatmulDescAttributes_t cublasLtMatrixLayoutAttribute_t cublasLtMatmulPreferenceAttributes_t
cublasLtMatmulAlgoConfigAttributes_t cublasLtMatmulAlgoCapAttributes_t cublasLtEpilogue_t
cublasLtMatrixTransformDescAttributes_t cublasLtMatmulSearch_t
cudnnStatus_t cudnnDataType_t cudnnTensorFormat_t cudnnBackendAttributeName_t cudnnBackendAttributeType_t
cudnnBackendDescriptorType_t cudnnBackendHeurMode_t cudnnBackendNumericalNote_t cudnnBackendBehaviorNote_t
cudnnRNNMode_t cudnnRNNBiasMode_t cudnnDirectionMode_t cudnnBatchNormMode_t cudnnBatchNormOps_t
cudnnConvolutionFwdAlgo_t cudnnConvolutionBwdDataAlgo_t cudnnConvolutionBwdFilterAlgo_t cudnnMathType_t
cudnnDeterminism_t cudnnLossNormalizationMode_t cudnnCTCLossAlgo_t cudnnBackendNormMode_t
cudnnBackendKnobType_t cudnnForwardMode_t cudnnRNNDataLayout_t cudnnRNNInputMode_t
cufftResult_t cufftType_t cusolverStatus_t cusolverEigMode_t cusparseStatus_t cusparseIndexType_t
cusparseFormat_t cusparseOrder_t cusparseSpGEMMAlg_t cusparseLtMatDescAttribute_t
cusparseLtMatmulDescAttribute_t cusparseLtMatmulAlgAttribute_t cusparseLtSparsity_t
ncclResult_t ncclDataType_t ncclRedOp_t nvrtcResult CUpti_ActivityKind CUfileOpError
nvmlReturn_enum nvmlTemperatureSensors_enum nvmlClockType_enum nvmlMemoryErrorType_enum
nvmlNvLinkCapability_enum nvmlGpuP2PStatus_enum nvmlEnableState_enum
""".split()
CUPTI_RESULT = {"CUptiResult"}

SONAME = re.compile(r"lib(\w+?)(?:_host)?\.so")
PREFIXES = [("cusparseLt", "cusparseLt"), ("cusparse", "cusparse"), ("cusolver", "cusolver"), ("cublasLt", "cublasLt"),
            ("cublas", "cublas"), ("cudnn", "cudnn"), ("cufft", "cufft"), ("cuFile", "cufile"), ("cupti", "cupti"),
            ("nvrtc", "nvrtc"), ("nccl", "nccl"), ("pnccl", "nccl"), ("nvshmem", "nvshmem"), ("nvml", "nvml"),
            ("__cuda", "cudart"), ("cuda", "cudart"), ("cu", "cuda")]


def library_of_header(path):
    base = os.path.basename(path)
    for pattern, library in LIBRARIES:
        if re.fullmatch(pattern, base):
            return library
    return None


def library_of_symbol(symbol):
    for prefix, library in PREFIXES:
        if re.match(prefix + r"[A-Z_Gm]", symbol) or symbol.startswith(prefix) and library in ("nvshmem", "nccl", "cudart"):
            return library
    return None


def strip(type_):
    return type_.get_canonical()


def abi(type_):
    """What a caller passes for a parameter of this type on x86-64."""
    t = strip(type_)
    if t.kind in (TypeKind.POINTER, TypeKind.CONSTANTARRAY, TypeKind.INCOMPLETEARRAY, TypeKind.LVALUEREFERENCE):
        if t.kind == TypeKind.POINTER or t.kind == TypeKind.LVALUEREFERENCE:
            to = strip(t.get_pointee())
        else:
            to = strip(t.element_type)
        if to.kind in (TypeKind.FUNCTIONPROTO, TypeKind.FUNCTIONNOPROTO, TypeKind.VOID) or to.is_const_qualified() \
                or spelled(type_).endswith("]") and spelled(type_).startswith("const "):
            return "ptr"
        size = to.get_size()
        return f"ptr[{size}]" if size > 0 else "ptr"
    if t.kind in (TypeKind.FUNCTIONPROTO, TypeKind.FUNCTIONNOPROTO):
        return "ptr"
    if t.kind == TypeKind.FLOAT:
        return "f32"
    if t.kind == TypeKind.DOUBLE:
        return "f64"
    if t.kind == TypeKind.RECORD:
        floats = all(strip(f.type).kind in (TypeKind.FLOAT, TypeKind.DOUBLE) for f in t.get_fields())
        return f"{'recf' if floats else 'rec'}[{t.get_size()}]"
    if t.kind == TypeKind.VOID:
        return "void"
    return "i64" if t.get_size() == 8 else "i32"


def spelled(type_):
    text = re.sub(r"\s+", " ", type_.spelling)
    return re.sub(r"\b(struct|enum|union) (?=\w)", "", text).strip()


def parse(toolkit, includes, language, headers, defines):
    gcc = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True).stdout.strip()
    args = [f"-x{language}", "-ferror-limit=0", f"-isystem{gcc}"] + [f"-I{d}" for d in includes] + defines
    if language == "c++":
        args.append("-std=c++17")
        for folder in sorted(glob.glob("/usr/include/c++/*")) + sorted(glob.glob("/usr/include/*/c++/*")):
            args.append(f"-isystem{folder}")
    present = [h for h in headers if any(os.path.exists(os.path.join(d, h)) for d in includes)]
    if not present:
        return None
    text = "#include <stddef.h>\n#include <stdint.h>\n" + "".join(f"#include <{h}>\n" for h in present)
    unit = Index.create().parse("api." + ("cpp" if language == "c++" else "c"), args=args,
                                unsaved_files=[("api." + ("cpp" if language == "c++" else "c"), text)])
    for problem in unit.diagnostics:
        if problem.severity >= 3:
            print(f"{toolkit} {' '.join(present)}: {problem}", file=sys.stderr)
    return unit


def cursors(unit):
    """Top-level declarations, with those inside extern "C" blocks and namespaces."""
    stack = [unit.cursor]
    while stack:
        for cursor in stack.pop().get_children():
            if cursor.kind in (CursorKind.LINKAGE_SPEC, CursorKind.UNEXPOSED_DECL, CursorKind.NAMESPACE):
                stack.append(cursor)
            else:
                yield cursor


def fields(type_, base=0, prefix=""):
    """Name, offset and size of every field, those of inner records with a dot."""
    for field in strip(type_).get_fields():
        offset = base + field.get_field_offsetof() // 8
        if field.is_bitfield():
            continue
        inner = strip(field.type)
        name = prefix + field.spelling
        if not re.fullmatch(r"\w+", field.spelling):  # an anonymous member
            yield from fields(inner, offset, prefix)
            continue
        yield name, offset, inner.get_size()
        if inner.kind == TypeKind.RECORD:
            yield from fields(inner, offset, name + ".")


def read_toolkit(toolkit, includes, out):
    for language, headers in UNITS:
        variants = VARIANTS if headers[0] == "cuda.h" else VARIANTS[:1]
        for defines in variants:
            unit = parse(toolkit, includes, language, headers, defines)
            if unit is None:
                continue
            for cursor in cursors(unit):
                if cursor.kind == CursorKind.FUNCTION_DECL:
                    note_function(toolkit, cursor, out)
                elif cursor.kind in (CursorKind.STRUCT_DECL, CursorKind.UNION_DECL, CursorKind.TYPEDEF_DECL):
                    note_record(toolkit, cursor, out)
                    note_enum(cursor, out)
                elif cursor.kind == CursorKind.ENUM_DECL:
                    note_enum(cursor, out)
    read_versions(toolkit, includes, out)


def note_function(toolkit, cursor, out):
    path = cursor.location.file.name if cursor.location.file else ""
    library = library_of_header(path)
    name = cursor.mangled_name if cursor.mangled_name and not cursor.mangled_name.startswith("_Z") else cursor.spelling
    if library is None or not re.match(r"_*(cu|nccl|pnccl|nvrtc|nvml|nvshmem)", name):
        return
    if cursor.storage_class.name == "STATIC" or cursor.is_definition():
        return
    params = []
    for i, p in enumerate(cursor.get_arguments()):
        params.append(f"{p.spelling or f'a{i}'}:{abi(p.type)}:{spelled(p.type)}")
    returns = f"{abi(cursor.result_type)}:{spelled(cursor.result_type)}"
    out["prototypes"][(name, library, returns, ";".join(params))].add(toolkit)


def note_record(toolkit, cursor, out):
    name = cursor.spelling
    if name not in RECORDS or cursor.type.get_size() <= 0:
        return
    rows = out["layouts"].setdefault((toolkit, name), [])
    if rows:
        return
    rows.append(("", 0, cursor.type.get_size()))
    rows.extend(fields(cursor.type))


def note_enum(cursor, out):
    name = cursor.spelling
    decl = cursor
    if cursor.kind == CursorKind.TYPEDEF_DECL:
        decl = strip(cursor.underlying_typedef_type).get_declaration()
    if decl.kind != CursorKind.ENUM_DECL or not (name in ENUMS or decl.spelling in ENUMS or name in CUPTI_RESULT):
        return
    for child in decl.get_children():
        if child.kind == CursorKind.ENUM_CONSTANT_DECL:
            out["constants"][child.spelling] = child.enum_value


def read_versions(toolkit, includes, out):
    """The CUDA version in which each ABI of a driver function appeared, from the public typedefs
    PFN_<name>_v<version>[_ptds|_ptsz]."""
    for folder in includes:
        for header in ("cudaTypedefs.h", "cudaProfilerTypedefs.h"):
            path = os.path.join(folder, header)
            if os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace") as f:
                    for name, version, kind in re.findall(r"\*PFN_(cu\w+?)_v(\d+)(_ptds|_ptsz)?\)", f.read()):
                        out["pfn"][name].add((int(version), kind))


def driver_versions(out):
    """Lines up versions and symbols: the n-th ABI of a name is its n-th suffix."""
    symbols = {name for (name, library, _, _) in out["prototypes"] if library == "cuda"}
    rows = []
    for base, versions in sorted(out["pfn"].items()):
        plain = sorted(v for v, kind in versions if not kind)
        named = [s for s in [base] + [f"{base}_v{i}" for i in range(2, 9)] if s in symbols]
        # An older ABI may have lost its declaration (then its version names no symbol), or its
        # typedef; the newest are always there.
        n = min(len(plain), len(named))
        pairs = list(zip(plain[len(plain) - n:], named[len(named) - n:]))
        if not pairs:
            print(f"{base}: versions {plain}, symbols {named}: left out", file=sys.stderr)
            continue
        per_thread = {}
        for version, kind in sorted(versions):
            older = [i for i, (v, _) in enumerate(pairs) if v <= version]
            if kind and older:
                per_thread[older[-1]] = kind
        for i, (version, symbol) in enumerate(pairs):
            rows.append((base, version, symbol, symbol + per_thread[i] if i in per_thread else ""))
    covered = {r[2] for r in rows} | {r[3] for r in rows}
    for symbol in sorted(symbols):
        plain = re.sub(r"_pt[sd][sz]$", "", symbol)
        if symbol not in covered and plain not in covered and symbol == plain:
            print(f"{symbol}: no version in the typedefs", file=sys.stderr)
    return rows


def read_imports(version, folder, out):
    defined, needed = set(), {}
    for path in sorted(glob.glob(os.path.join(folder, "*.so*"))):
        for flag, sink in (("--defined-only", None), ("--undefined-only", needed)):
            listing = subprocess.run(["nm", "-D", flag, path], capture_output=True, text=True, check=True).stdout
            for line in listing.splitlines():
                symbol, _, origin = line.split()[-1].partition("@")
                if sink is None:
                    defined.add(symbol)
                elif not symbol.startswith("_Z"):
                    sink.setdefault(symbol, origin.lstrip("@"))
    for symbol, origin in needed.items():
        if symbol in defined:
            continue
        match = SONAME.match(origin)
        library = library_of_symbol(symbol)
        if match and library is None:
            library = match.group(1)
            if library in ("c", "m", "dl", "pthread", "gcc_s", "stdc++", "rt", "gomp", "gfortran", "z", "util", "python3"):
                continue
        if library and library != "cuda" or library and origin.startswith("libcuda"):
            out["imports"][(symbol, library)].add(version)
    # The driver and NVML are not linked but looked up, by names that are
    # in the library as they are.
    with open(os.path.join(folder, "libc10_cuda.so"), "rb") as f:
        for name in re.findall(rb"\0((?:cu|nvml)[A-Z]\w+)(?=\0)", f.read()):
            out["imports"][(name.decode(), "nvml" if name.startswith(b"nvml") else "cuda")].add(version)


def version_key(version):
    return [int(part) for part in version.split(".")]


def write(folder, name, rows):
    path = os.path.join(folder, name)
    with open(path, "w", encoding="utf-8") as f:
        for row in rows:
            f.write("\t".join(str(c) for c in row) + "\n")
    print(f"{path}: {len(rows)} rows")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--headers", action="append", required=True, metavar="TOOLKIT=DIR[:DIR...]")
    parser.add_argument("--torch", action="append", required=True, metavar="VERSION=DIR")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    out = {"prototypes": defaultdict(set), "imports": defaultdict(set), "layouts": {}, "constants": {},
           "pfn": defaultdict(set)}
    for spec in args.torch:
        version, _, folder = spec.partition("=")
        if not glob.glob(os.path.join(folder, "libtorch_cuda.so")):
            sys.exit(f"--torch {spec}: no libtorch_cuda.so there; give the torch/lib folder of a CUDA wheel")
        read_imports(version, folder, out)
    # Values of enumerators never change, names come and go: read the newest last.
    for spec in sorted(args.headers, key=lambda s: version_key(s.partition("=")[0])):
        toolkit, _, folders = spec.partition("=")
        includes = folders.split(":")
        for folder in includes:
            if not os.path.isdir(folder):
                sys.exit(f"--headers {spec}: {folder} is not a folder")
        read_toolkit(toolkit, includes, out)

    imported = {symbol for symbol, _ in out["imports"]}
    join = lambda versions: ",".join(sorted(versions, key=version_key))
    write(args.out, "prototypes.tsv", sorted(
        (name, library, join(toolkits), returns, params)
        for (name, library, returns, params), toolkits in out["prototypes"].items()
        if library in WHOLE or name in imported))
    write(args.out, "imports.tsv", sorted((s, l, join(v)) for (s, l), v in out["imports"].items()))
    write(args.out, "layouts.tsv", sorted(
        (toolkit, record, field, offset, size)
        for (toolkit, record), rows in out["layouts"].items() for field, offset, size in rows))
    write(args.out, "constants.tsv", sorted(out["constants"].items()))
    write(args.out, "driver_versions.tsv", driver_versions(out))
    declared = {name for (name, _, _, _) in out["prototypes"]}
    bare = sorted(imported - declared)
    if bare:
        print("imported but in no header:", " ".join(bare), file=sys.stderr)


if __name__ == "__main__":
    main()
