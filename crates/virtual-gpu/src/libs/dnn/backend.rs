//! cuDNN's backend: operation graphs, engines, plans.
//!
//! A descriptor is a set of attributes. An attribute that is another descriptor is kept as that
//! one was when it was set, as the manual says (descriptors are finalized before). The heuristics
//! know the engines that `workspace` has for a graph's convolution, without knobs, and one
//! without a workspace for every other graph.
//!
//! The getter, called without room, returns how many elements there are. Called with room, it fills
//! them in. Where they are descriptors, it fills the descriptors that the caller made, and returns
//! how many. PyTorch 2.15 asks for fewer than there are, and takes that number.

mod graph;

use super::{DNN, Status};
use crate::constants as c;
use crate::gpu::boundary::{In, Out};
use crate::gpu::handle::Registry;
use crate::gpu::log;
use core::ffi::c_void;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The most elements of an attribute that anyone sets; more is a mistake.
const MAX: i64 = 1 << 16;

#[derive(Clone)]
enum Value {
    Plain { count: i64, bytes: Vec<u8> },
    Descriptors(Vec<Arc<Descriptor>>),
}

#[derive(Clone)]
struct Descriptor {
    kind: i32,
    attributes: BTreeMap<i32, Value>,
}

impl Descriptor {
    fn new(kind: i32) -> Self {
        Self { kind, attributes: BTreeMap::new() }
    }

    /// A descriptor that the library makes itself.
    fn made(kind: i32, attributes: impl IntoIterator<Item = (i32, Value)>) -> Arc<Self> {
        let mut desc = Self::new(kind);
        desc.attributes.extend(attributes);
        desc.finalize();
        Arc::new(desc)
    }

    /// Adds what the library knows of a descriptor once it is complete.
    fn finalize(&mut self) {
        let known = match self.kind {
            c::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR => {
                let count = self.engines().len() as i64;
                vec![(c::CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, number(count))]
            }
            c::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR => {
                vec![(c::CUDNN_ATTR_ENGINEHEUR_RESULTS, self.configurations())]
            }
            c::CUDNN_BACKEND_ENGINE_DESCRIPTOR if self.engine().tensor_cores => {
                let note = c::CUDNN_NUMERICAL_NOTE_TENSOR_CORE.to_ne_bytes().to_vec();
                let notes = Value::Plain { count: 1, bytes: note };
                vec![(c::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, notes)]
            }
            c::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR => vec![
                (c::CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, number(self.engine().workspace)),
                (c::CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED, number(0)),
            ],
            c::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR => {
                let text = Value::Plain { count: 3, bytes: b"{}\0".to_vec() };
                vec![
                    (c::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, number(self.planned())),
                    (c::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, text),
                ]
            }
            _ => Vec::new(),
        };
        self.attributes.extend(known);
    }

    /// What the heuristics find: each engine for their graph, in the order in which to try
    /// them. Asked for a fallback they leave out the first: PyTorch does so when memory was
    /// short for it, or when it rounds and may not.
    fn configurations(&self) -> Value {
        let graph = self.attributes.get(&c::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
        let graph = graph.map(|graph| (c::CUDNN_ATTR_ENGINE_OPERATION_GRAPH, graph.clone()));
        let count = self.engines().len() as i64;
        let mode = self.attributes.get(&c::CUDNN_ATTR_ENGINEHEUR_MODE);
        let fallback = matches!(mode, Some(Value::Plain { bytes, .. })
            if *bytes == c::CUDNN_HEUR_MODE_FALLBACK.to_ne_bytes());
        let first = i64::from(fallback && count > 1);
        let configurations = (first..count).map(|index| {
            let index = (c::CUDNN_ATTR_ENGINE_GLOBAL_INDEX, number(index));
            let parts = graph.clone().into_iter().chain([index]);
            let engine = Self::made(c::CUDNN_BACKEND_ENGINE_DESCRIPTOR, parts);
            let engine = (c::CUDNN_ATTR_ENGINECFG_ENGINE, Value::Descriptors(vec![engine]));
            Self::made(c::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, [engine])
        });
        Value::Descriptors(configurations.collect())
    }
}

static DESCRIPTORS: Registry<Arc<Descriptor>> = Registry::new(38);

fn number(value: i64) -> Value {
    Value::Plain { count: 1, bytes: value.to_ne_bytes().to_vec() }
}

/// Bytes of one element; enumerations have four.
fn element_bytes(attribute_type: i32) -> usize {
    match attribute_type {
        c::CUDNN_TYPE_BOOLEAN | c::CUDNN_TYPE_CHAR => 1,
        c::CUDNN_TYPE_HANDLE
        | c::CUDNN_TYPE_INT64
        | c::CUDNN_TYPE_DOUBLE
        | c::CUDNN_TYPE_VOID_PTR
        | c::CUDNN_TYPE_BACKEND_DESCRIPTOR => 8,
        c::CUDNN_TYPE_FRACTION => crate::layout::all::cudnnFractionStruct::SIZE,
        _ => 4,
    }
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendCreateDescriptor(kind: i32, out: Out<*mut c_void>) -> i32 {
    super::create(&DESCRIPTORS, out, Arc::new(Descriptor::new(kind)))
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendDestroyDescriptor(descriptor: *mut c_void) -> i32 {
    super::destroy(&DESCRIPTORS, descriptor)
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendSetAttribute(
    descriptor: *mut c_void,
    name: i32,
    attribute_type: i32,
    count: i64,
    elements: In<u8>,
) -> i32 {
    DNN.answer(|| {
        if !(0..=MAX).contains(&count) || (count > 0 && elements.is_null()) {
            return Err(DNN.bad_value());
        }
        let value = if attribute_type == c::CUDNN_TYPE_BACKEND_DESCRIPTOR {
            let handles = elements.cast::<*mut c_void>().list(count as usize);
            let descriptors = handles.into_iter().map(|h| DESCRIPTORS.with(h, |desc| desc.clone()));
            Value::Descriptors(descriptors.collect::<Option<_>>().ok_or(DNN.bad_value())?)
        } else {
            let bytes = elements.list(count as usize * element_bytes(attribute_type));
            Value::Plain { count, bytes }
        };
        let found =
            DESCRIPTORS.with(descriptor, |desc| Arc::make_mut(desc).attributes.insert(name, value));
        found.map(drop).ok_or(DNN.bad_value())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendFinalize(descriptor: *mut c_void) -> i32 {
    DNN.answer(|| {
        DESCRIPTORS.with(descriptor, |desc| Arc::make_mut(desc).finalize()).ok_or(DNN.bad_value())
    })
}

/// Attributes of which an engine has none, unless it says so.
const NONE: [i32; 8] = [
    c::CUDNN_ATTR_ENGINE_KNOB_INFO,
    c::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
    c::CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE,
    c::CUDNN_ATTR_ENGINE_LAYOUT_INFO,
    c::CUDNN_ATTR_ENGINECFG_KNOB_CHOICES,
    c::CUDNN_ATTR_ENGINECFG_INTERMEDIATE_INFO,
    c::CUDNN_ATTR_EXECUTION_PLAN_COMPUTED_INTERMEDIATE_UIDS,
    c::CUDNN_ATTR_EXECUTION_PLAN_RUN_ONLY_INTERMEDIATE_UIDS,
];

#[unsafe(no_mangle)]
extern "C" fn cudnnBackendGetAttribute(
    descriptor: *mut c_void,
    name: i32,
    attribute_type: i32,
    wanted: i64,
    count: Out<i64>,
    elements: Out<u8>,
) -> i32 {
    DNN.answer(|| {
        let desc = DESCRIPTORS.with(descriptor, |desc| desc.clone()).ok_or(DNN.bad_value())?;
        log::debug(2, || {
            format!(
                "cuDNN attribute {name} of descriptor type {} is read, room {wanted}",
                desc.kind
            )
        });
        let room = if elements.is_null() { 0 } else { wanted.clamp(0, MAX) as usize };
        match desc.attributes.get(&name) {
            Some(Value::Plain { count: n, bytes }) => {
                count.give(*n);
                elements.fill(bytes, room * element_bytes(attribute_type));
                Ok(())
            }
            Some(Value::Descriptors(descriptors)) => {
                // With room: how many of the caller's descriptors are filled in.
                let filled = if room > 0 { descriptors.len().min(room) } else { descriptors.len() };
                count.give(filled as i64);
                for (i, desc) in descriptors.iter().take(room).enumerate() {
                    copy_into(elements.at(i * size_of::<*mut c_void>()), desc)?;
                }
                Ok(())
            }
            None if NONE.contains(&name) => {
                count.give(0);
                Ok(())
            }
            None => {
                log::warn_once(&format!("cuDNN backend attribute {name} is not supported"));
                Err(c::CUDNN_STATUS_NOT_SUPPORTED)
            }
        }
    })
}

/// Makes the caller's descriptor a copy of the library's.
fn copy_into(place: Out<*mut c_void>, desc: &Arc<Descriptor>) -> Status {
    let target = place.get().map_err(|_| DNN.bad_value())?;
    DESCRIPTORS.with(target, |target| *target = desc.clone()).ok_or(DNN.bad_value())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libs::testing::{input, output};

    fn create(kind: i32) -> *mut c_void {
        DESCRIPTORS.insert(Arc::new(Descriptor::new(kind)))
    }

    fn set<T>(desc: *mut c_void, name: i32, attribute_type: i32, value: &T) {
        let place = input(value);
        assert_eq!(cudnnBackendSetAttribute(desc, name, attribute_type, 1, place), 0);
    }

    fn get<T>(desc: *mut c_void, name: i32, attribute_type: i32, value: &mut T) -> i64 {
        let mut count = -1i64;
        let place = output(value);
        let counted = output(&mut count);
        assert_eq!(cudnnBackendGetAttribute(desc, name, attribute_type, 1, counted, place), 0);
        count
    }

    /// The way of every caller: graph, heuristics, configuration, engine, plan, workspace.
    #[test]
    fn from_graph_to_plan() {
        let graph = create(c::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
        assert_eq!(cudnnBackendFinalize(graph), 0);
        let heuristics = create(c::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
        let descriptor = c::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        set(heuristics, c::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, descriptor, &graph);
        assert_eq!(cudnnBackendFinalize(heuristics), 0);

        let mut configuration = create(c::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        let results = c::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        assert_eq!(get(heuristics, results, descriptor, &mut configuration), 1);
        let mut engine = create(c::CUDNN_BACKEND_ENGINE_DESCRIPTOR);
        let of = c::CUDNN_ATTR_ENGINECFG_ENGINE;
        assert_eq!(get(configuration, of, descriptor, &mut engine), 1);
        let mut index = -1i64;
        let global = c::CUDNN_ATTR_ENGINE_GLOBAL_INDEX;
        assert_eq!(get(engine, global, c::CUDNN_TYPE_INT64, &mut index), 1);
        assert_eq!(index, 0);
        let notes = c::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE;
        assert_eq!(get(engine, notes, c::CUDNN_TYPE_NUMERICAL_NOTE, &mut 0i32), 0);

        let plan = create(c::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        let name = c::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
        set(plan, name, descriptor, &configuration);
        assert_eq!(cudnnBackendFinalize(plan), 0);
        let mut size = -1i64;
        let workspace = c::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE;
        assert_eq!(get(plan, workspace, c::CUDNN_TYPE_INT64, &mut size), 1);
        assert_eq!(size, 0, "an empty graph");
    }

    fn numbers<const N: usize>(desc: *mut c_void, name: i32, values: [i64; N]) {
        let place = input(&values);
        let status = cudnnBackendSetAttribute(desc, name, c::CUDNN_TYPE_INT64, N as i64, place);
        assert_eq!(status, 0);
    }

    /// A convolution's graph, as callers describe it: ResNet-50's last stage,
    /// the gradient of a filter of one pixel.
    fn convolution() -> *mut c_void {
        let tensor = |dims: [i64; 4]| {
            let desc = create(c::CUDNN_BACKEND_TENSOR_DESCRIPTOR);
            let data_type = c::CUDNN_TYPE_DATA_TYPE;
            set(desc, c::CUDNN_ATTR_TENSOR_DATA_TYPE, data_type, &c::CUDNN_DATA_FLOAT);
            let strides = [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1];
            numbers(desc, c::CUDNN_ATTR_TENSOR_DIMENSIONS, dims);
            numbers(desc, c::CUDNN_ATTR_TENSOR_STRIDES, strides);
            assert_eq!(cudnnBackendFinalize(desc), 0);
            desc
        };
        let description = create(c::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
        numbers(description, c::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, [0, 0]);
        numbers(description, c::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, [1, 1]);
        numbers(description, c::CUDNN_ATTR_CONVOLUTION_DILATIONS, [1, 1]);
        assert_eq!(cudnnBackendFinalize(description), 0);
        let node = create(c::CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR);
        let descriptor = c::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        let x = tensor([32, 512, 7, 7]);
        set(node, c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, descriptor, &x);
        let w = tensor([2048, 512, 1, 1]);
        set(node, c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, descriptor, &w);
        let y = tensor([32, 2048, 7, 7]);
        set(node, c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, descriptor, &y);
        let name = c::CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC;
        set(node, name, descriptor, &description);
        assert_eq!(cudnnBackendFinalize(node), 0);
        let graph = create(c::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
        set(graph, c::CUDNN_ATTR_OPERATIONGRAPH_OPS, descriptor, &node);
        assert_eq!(cudnnBackendFinalize(graph), 0);
        graph
    }

    /// The workspaces that the heuristics' configurations say, in their
    /// order; the tests' card has tensor cores.
    fn workspaces<const ROOM: usize>(mode: i32) -> Vec<i64> {
        let (graph, descriptor) = (convolution(), c::CUDNN_TYPE_BACKEND_DESCRIPTOR);
        let heuristics = create(c::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
        set(heuristics, c::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, descriptor, &graph);
        set(heuristics, c::CUDNN_ATTR_ENGINEHEUR_MODE, c::CUDNN_TYPE_HEUR_MODE, &mode);
        assert_eq!(cudnnBackendFinalize(heuristics), 0);
        let mut found = [0; ROOM].map(|_| create(c::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
        let mut count = -1i64;
        let (places, counted) = (output(&mut found), output(&mut count));
        let results = c::CUDNN_ATTR_ENGINEHEUR_RESULTS;
        let wanted = ROOM as i64;
        let status =
            cudnnBackendGetAttribute(heuristics, results, descriptor, wanted, counted, places);
        assert_eq!(status, 0);
        assert!((0..=wanted).contains(&count), "as many as were filled in: {count}");
        let size = c::CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE;
        let filled = found[..count as usize].iter();
        filled
            .map(|configuration| {
                let mut bytes = -1i64;
                assert_eq!(get(*configuration, size, c::CUDNN_TYPE_INT64, &mut bytes), 1);
                bytes
            })
            .collect()
    }

    /// Issue F, B17: PyTorch asks for one configuration, and for something
    /// to fall back on when memory is short.
    #[test]
    fn a_convolution_has_engines_in_order() {
        let copies = 32 * (512 + 2048) * 49 * 4;
        let sums = 32 * 512 * 2048 * 4;
        assert_eq!(workspaces::<5>(c::CUDNN_HEUR_MODE_INSTANT), [copies, sums, 0]);
        assert_eq!(workspaces::<1>(c::CUDNN_HEUR_MODE_INSTANT), [copies]);
        assert_eq!(workspaces::<5>(c::CUDNN_HEUR_MODE_FALLBACK), [sums, 0]);
    }

    #[test]
    fn strangers_are_refused() {
        let bad = core::ptr::without_provenance_mut(16);
        assert_eq!(cudnnBackendFinalize(bad), DNN.bad_value());
        let plan = create(c::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        let place = input(&bad);
        let name = c::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG;
        let descriptor = c::CUDNN_TYPE_BACKEND_DESCRIPTOR;
        assert_eq!(cudnnBackendSetAttribute(plan, name, descriptor, 1, place), DNN.bad_value());
        let mut count = 0i64;
        let (count, place) = (output(&mut count), output(&mut 0u8));
        let status = cudnnBackendGetAttribute(plan, 99_999, descriptor, 0, count, place);
        assert_eq!(status, c::CUDNN_STATUS_NOT_SUPPORTED);
    }
}
