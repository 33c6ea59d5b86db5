// Recorded launches without Python: autograd's node, the buffers and the kernels of both passes of an operation.
//
// An eager call from Python costs several times as much as what it launches: the Function, its context, a launcher that
// parses sixty arguments. Here a way is looked up by what its launches depend on: the operation and its options, and
// the shapes, strides, dtypes and devices of its inputs. Each kernel's parameters lie side by side as it reads them; a
// call copies them, writes the addresses of its tensors into the copy, and launches.
//
// The tensors of a pass have numbers: of forward, its inputs and then what it makes; of backward, the gradients of the
// outputs, what forward saved, and what backward makes.
//
// native.py makes the ways from what Triton compiled and launched once. Nothing here is compiled for a device: the
// functions of the driver are addresses, given by Python, and cuda.h describes what they take.

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <cuda.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using namespace torch::autograd;

constexpr uintptr_t kAlignment = 16;     // Triton compiled the kernels for such addresses
constexpr size_t kMostBytes = 4096;      // what a kernel may take as parameters
constexpr size_t kMostParameters = 256;
constexpr size_t kMostWays = 4096;       // a few kilobytes each

decltype(&cuLaunchKernelEx) launch_kernel = nullptr;
decltype(&cuTensorMapReplaceAddress) replace_address = nullptr;
decltype(&cuDeviceGet) device_of = nullptr;
decltype(&cuDevicePrimaryCtxRetain) primary_context = nullptr;
decltype(&cuCtxSetCurrent) set_context = nullptr;

// Give this thread the device's context: a new thread has none until it calls CUDA's runtime, which no cached
// allocation does.
void enter_context(int index) {
  CUdevice device;
  CUcontext context;
  TORCH_CHECK(device_of(&device, index) == CUDA_SUCCESS && primary_context(&context, device) == CUDA_SUCCESS &&
                  set_context(context) == CUDA_SUCCESS,
              "the driver gives no context of device ", index);
}

// One kernel, with all its parameters except the addresses of the tensors.
struct Launch {
  CUfunction function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared;
  std::string bytes;                                      // the parameters
  std::vector<uint32_t> places;                           // where each begins in the bytes
  std::vector<std::array<int64_t, 3>> addresses;          // a place in the bytes, a tensor, and bytes from its start
  std::vector<std::array<int64_t, 3>> descriptors;        // the same of tensor maps

  void run(const uintptr_t* tensors, CUstream stream, int device) const {
    alignas(128) char copy[kMostBytes];
    void* parameters[kMostParameters];
    std::memcpy(copy, bytes.data(), bytes.size());
    for (auto [place, tensor, offset] : addresses) {
      auto address = tensors[tensor] + offset;
      std::memcpy(copy + place, &address, sizeof address);
    }
    for (auto [place, tensor, offset] : descriptors) {
      auto* map = reinterpret_cast<CUtensorMap*>(copy + place);
      TORCH_CHECK(replace_address(map, reinterpret_cast<void*>(tensors[tensor] + offset)) == CUDA_SUCCESS,
                  "the driver refuses the address of a tensor's descriptor");
    }
    for (size_t i = 0; i < places.size(); ++i) parameters[i] = copy + places[i];
    CUlaunchConfig config{};
    config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
    config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = shared, config.hStream = stream;
    auto status = launch_kernel(&config, function, parameters, nullptr);
    if (status == CUDA_ERROR_INVALID_CONTEXT) {
      enter_context(device);
      status = launch_kernel(&config, function, parameters, nullptr);
    }
    TORCH_CHECK(status == CUDA_SUCCESS, "the driver cannot launch a kernel, error ", int(status));
  }
};

// How a tensor lies: sizes, strides, dtype.
struct Layout {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool is_of(const Tensor& tensor) const {
    return tensor.scalar_type() == dtype && tensor.sizes() == sizes && tensor.strides() == strides;
  }
};

// A result: a tensor of its pass, or a view of one, so many numbers from its start.
struct Result {
  int64_t tensor, offset;
  Layout layout;
};

struct Pass {
  std::vector<Layout> made;
  std::vector<Launch> launches;
  std::vector<Result> results;
};

struct Way {
  uint64_t number;                                // no other way ever has it
  std::string name;
  std::vector<Layout> inputs;
  Pass forward, backward;
  std::vector<int64_t> saved;                     // tensors of forward
  std::vector<Layout> gradients;                  // of each output
  bool learnt_backward = false;
  bool any_order = false;                         // sums of backward are added up in any order
  std::vector<Layout> saved_layouts;
  pybind11::function by_python;                   // backward from gradients and saved tensors, where launches do not hold
};

// A way lives as long as it is known or a node of a graph points at it. What it has of Python's needs the lock of the
// interpreter to go, and stays where that has ended.
using Pointer = std::shared_ptr<const Way>;

Pointer kept(Way&& way) {
  return Pointer(new Way(std::move(way)), [](const Way* way) {
    if (!Py_IsInitialized()) return;
    pybind11::gil_scoped_acquire python;
    delete way;
  });
}

std::mutex guard;
auto& known = *new std::unordered_map<std::string, Pointer>();  // stays when the process ends

template <class T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string key_of(int64_t what, const std::vector<Tensor>& inputs, const std::vector<int64_t>& options) {
  std::string key;
  key.reserve(512);
  append(key, what);
  for (const auto& tensor : inputs) {
    append(key, tensor.dim());
    for (auto size : tensor.sizes()) append(key, size);
    for (auto stride : tensor.strides()) append(key, stride);
    append(key, tensor.scalar_type());
    append(key, tensor.device().index());
  }
  for (auto option : options) append(key, option);
  return key;
}

bool plain(const Tensor& tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

// Whether somebody follows operators: then backward is one, too.
bool watched() {
  return at::GradMode::is_enabled() || at::hasCallbacks() || c10::impl::TorchDispatchModeTLS::stack_len() > 0;
}

bool aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % kAlignment == 0; }

// Make what a pass makes beside the tensors that it is given, and launch its kernels.
void launched(const Pass& pass, std::vector<Tensor>& tensors, int64_t stream) {
  const auto options = tensors[0].options();
  for (const auto& layout : pass.made)
    tensors.push_back(at::empty_strided(layout.sizes, layout.strides, options.dtype(layout.dtype)));
  std::vector<uintptr_t> addresses;
  addresses.reserve(tensors.size());
  for (const auto& tensor : tensors)
    addresses.push_back(tensor.defined() ? reinterpret_cast<uintptr_t>(tensor.data_ptr()) : 0);
  const auto device = tensors[0].is_cpu() ? 0 : tensors[0].device().index();
  for (const auto& launch : pass.launches) launch.run(addresses.data(), reinterpret_cast<CUstream>(stream), device);
}

Tensor result_of(const Result& result, const std::vector<Tensor>& tensors) {
  if (result.tensor < 0) return Tensor();
  const auto& tensor = tensors[result.tensor];
  if (result.offset == 0 && result.layout.is_of(tensor)) return tensor;
  return tensor.as_strided(result.layout.sizes, result.layout.strides, tensor.storage_offset() + result.offset);
}

struct DeviceOf {
  c10::OptionalDeviceGuard guard;
  explicit DeviceOf(const Tensor& tensor) {
    if (!tensor.device().is_cpu()) guard.reset_device(tensor.device());
  }
};

// Nodes of autograd's graph are kept by one kind of pointer or another, by PyTorch's version.
template <class T>
auto made_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>)
    return c10::make_intrusive<T>();
  else
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
}

template <class T>
auto pointer_to(T* node) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, T>)
    return c10::intrusive_ptr<Node>::unsafe_reclaim_from_nonowning(node);
  else
    return node->shared_from_this();
}

struct RecordedBackward : public Node {
  std::vector<SavedVariable> saved;
  Pointer way;
  int64_t stream = 0;  // autograd runs backward on the stream of forward

  std::string name() const override { return way->name; }

  void release_variables() override {
    std::lock_guard<std::mutex> held(mutex_);
    for (auto& each : saved) each.reset_data();
  }

  // Compiled autograd runs backward once on tensors without data. Python then calls the operator, which it records.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(way->number);
    args.collect(saved, true);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    for (auto& each : saved) swap.before(each);
    auto found = apply(variable_list(gradients));
    for (auto& each : saved) swap.after(each);
    return found;
  }

  variable_list apply(variable_list&& gradients) override {
    std::lock_guard<std::mutex> held(mutex_);
    bool any = false;
    for (const auto& each : gradients) any = any || each.defined();
    if (!any) return variable_list(way->inputs.size());
    std::vector<Tensor> tensors(gradients.begin(), gradients.end());
    for (auto& each : saved) tensors.push_back(each.unpack(pointer_to(this)));
    for (size_t i = 0; i < gradients.size(); ++i)
      if (!tensors[i].defined()) {  // of an output that nobody used: zeros, as a Function in Python gets
        const auto& output = way->forward.results[i].layout;
        tensors[i] = at::zeros(output.sizes, tensors.back().options().dtype(output.dtype));
      }
    if (!holds(tensors)) return by_python(tensors);
    DeviceOf here(tensors[0]);
    at::AutoDispatchBelowADInplaceOrView below;
    launched(way->backward, tensors, stream);
    variable_list found;
    for (const auto& result : way->backward.results) found.push_back(result_of(result, tensors));
    return found;
  }

 private:
  // Whether the recorded launches hold: not for a gradient that lies in another way, a saved tensor that came back in
  // another layout, or an order of sums that must be the same each time.
  bool holds(const std::vector<Tensor>& tensors) const {
    if (!way->learnt_backward || watched()) return false;
    if (way->any_order && at::globalContext().deterministicAlgorithms()) return false;
    const auto outputs = way->gradients.size();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto& layout = i < outputs ? way->gradients[i] : way->saved_layouts[i - outputs];
      if (!plain(tensors[i]) || !layout.is_of(tensors[i]) || !aligned(tensors[i]) ||
          tensors[i].device() != tensors[0].device())
        return false;
    }
    return true;
  }

  variable_list by_python(const std::vector<Tensor>& tensors) const {
    pybind11::gil_scoped_acquire python;
    pybind11::list given;
    for (const auto& tensor : tensors) given.append(tensor);
    variable_list found;
    for (auto each : way->by_python(*given)) found.push_back(each.is_none() ? Tensor() : each.cast<Tensor>());
    found.resize(way->inputs.size());
    return found;
  }
};

// The outputs of a call whose launches are known; None of any other, which Python then runs.
std::optional<std::vector<Tensor>> call(int64_t what, const std::vector<Tensor>& inputs,
                                        const std::vector<int64_t>& options, int64_t stream) {
  Pointer way;
  {
    std::lock_guard<std::mutex> held(guard);
    auto found = known.find(key_of(what, inputs, options));
    if (found == known.end()) return std::nullopt;
    way = found->second;
  }
  for (const auto& tensor : inputs)  // a tangent is forward-mode differentiation's, which Python refuses
    if (!aligned(tensor) || tensor._fw_grad(0).defined()) return std::nullopt;
  std::vector<Tensor> tensors(inputs), outputs;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    DeviceOf here(inputs[0]);
    launched(way->forward, tensors, stream);
    for (const auto& result : way->forward.results) outputs.push_back(result_of(result, tensors));
  }
  if (compute_requires_grad(inputs)) {
    auto node = made_node<RecordedBackward>();
    node->way = way, node->stream = stream;
    node->set_next_edges(collect_next_edges(inputs));
    for (auto& output : outputs) set_history(output, node);
    for (auto number : way->saved) {
      auto is_output = false;
      for (const auto& output : outputs) is_output = is_output || output.is_same(tensors[number]);
      node->saved.emplace_back(tensors[number], is_output);
    }
  }
  return outputs;
}

Layout layout_of(const pybind11::handle& of) {
  auto tuple = of.cast<pybind11::tuple>();
  return {tuple[0].cast<std::vector<int64_t>>(), tuple[1].cast<std::vector<int64_t>>(),
          reinterpret_cast<THPDtype*>(tuple[2].ptr())->scalar_type};
}

std::vector<Layout> layouts_of(const pybind11::handle& of) {
  std::vector<Layout> found;
  for (auto each : of) found.push_back(layout_of(each));
  return found;
}

Launch launch_of(const pybind11::handle& of) {
  Launch launch;
  launch.function = reinterpret_cast<CUfunction>(of["function"].cast<uintptr_t>());
  launch.grid = of["grid"].cast<std::array<unsigned, 3>>();
  launch.threads = of["threads"].cast<unsigned>();
  launch.shared = of["shared"].cast<unsigned>();
  launch.bytes = of["bytes"].cast<std::string>();
  launch.places = of["places"].cast<std::vector<uint32_t>>();
  launch.addresses = of["addresses"].cast<std::vector<std::array<int64_t, 3>>>();
  launch.descriptors = of["descriptors"].cast<std::vector<std::array<int64_t, 3>>>();
  TORCH_CHECK(launch.bytes.size() <= kMostBytes && launch.places.size() <= kMostParameters, "too many parameters");
  return launch;
}

Pass pass_of(const pybind11::dict& of) {
  Pass pass;
  pass.made = layouts_of(of["made"]);
  for (auto each : of["launches"]) pass.launches.push_back(launch_of(each));
  for (auto each : of["results"]) {
    if (each.is_none()) {
      pass.results.push_back({-1, 0, {}});
      continue;
    }
    auto tuple = each.cast<pybind11::tuple>();
    pass.results.push_back({tuple[0].cast<int64_t>(), tuple[1].cast<int64_t>(), layout_of(tuple[2])});
  }
  return pass;
}

void forget() {
  std::unordered_map<std::string, Pointer> gone;  // they go when the guard is free: one that waits may hold Python's lock
  std::lock_guard<std::mutex> held(guard);
  std::swap(known, gone);
}

// Learn the launches of a call, of forward alone or of both passes. Where as many are known as may be, all are forgotten
// first: true then.
bool learn(const pybind11::bytes& key, const pybind11::dict& of) {
  static std::atomic<uint64_t> numbers{0};
  Way way;
  way.number = numbers++;
  way.name = of["name"].cast<std::string>();
  way.inputs = layouts_of(of["inputs"]);
  way.forward = pass_of(of["forward"].cast<pybind11::dict>());
  way.saved = of["saved"].cast<std::vector<int64_t>>();
  way.by_python = of["by_python"].cast<pybind11::function>();
  way.any_order = of["any_order"].cast<bool>();
  for (auto number : way.saved)
    way.saved_layouts.push_back(size_t(number) < way.inputs.size() ? way.inputs[number]
                                                                   : way.forward.made[number - way.inputs.size()]);
  if (!of["backward"].is_none()) {
    way.learnt_backward = true;
    way.backward = pass_of(of["backward"].cast<pybind11::dict>());
    way.gradients = layouts_of(of["gradients"]);
  }
  const auto full = known.size() >= kMostWays;
  if (full) forget();
  auto made = kept(std::move(way));
  std::lock_guard<std::mutex> held(guard);
  std::swap(known[key], made);
  return full;
}

// The addresses of the driver's functions, in the order of `DRIVER` in native.py.
void set_driver(const std::array<uintptr_t, 5>& functions) {
  launch_kernel = reinterpret_cast<decltype(launch_kernel)>(functions[0]);
  replace_address = reinterpret_cast<decltype(replace_address)>(functions[1]);
  device_of = reinterpret_cast<decltype(device_of)>(functions[2]);
  primary_context = reinterpret_cast<decltype(primary_context)>(functions[3]);
  set_context = reinterpret_cast<decltype(set_context)>(functions[4]);
}

// What a node keeps, as that of a Function in Python shows it.
PyObject* raw_saved(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  auto* node = static_cast<RecordedBackward*>(reinterpret_cast<THPCppFunction*>(self)->cdata.get());
  pybind11::tuple found(node->saved.size());
  for (size_t i = 0; i < node->saved.size(); ++i)
    found[i] = pybind11::cast(node->saved[i], pybind11::return_value_policy::reference);
  return found.release().ptr();
  END_HANDLE_TH_ERRORS
}

struct NotFromPython {
  Node* operator()(PyObject*) { throw std::runtime_error("a node of recorded launches is made by its forward"); }
};

PyTypeObject* show_node() {
  static PyMethodDef methods[] = {
      {"_register_hook_dict", THPCppFunction_register_hook_dict, METH_O, nullptr},
      {"register_hook", THPCppFunction_register_hook, METH_O, nullptr},
      {"register_prehook", THPCppFunction_register_prehook, METH_O, nullptr},
      {"name", THPCppFunction_name, METH_NOARGS, nullptr},
      {"_sequence_nr", THPCppFunction_sequence_nr, METH_NOARGS, nullptr},
      {nullptr}};
  static PyGetSetDef properties[] = {
      {"next_functions", THPCppFunction_next_functions, nullptr, nullptr, nullptr},
      {"requires_grad", THPCppFunction_requires_grad, nullptr, nullptr, nullptr},
      {"metadata", THPCppFunction_metadata, nullptr, nullptr, nullptr},
      {"_input_metadata", THPCppFunction_input_metadata, nullptr, nullptr, nullptr},
      {"_raw_saved_tensors", raw_saved, nullptr, nullptr, nullptr},
      {nullptr}};
  static PyTypeObject type;
  createForwardFunctionPyTypeObject<NotFromPython>(type, "RecordedBackward", properties, methods);
  registerCppFunction(typeid(RecordedBackward), &type);
  return &type;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("Node") = pybind11::handle(reinterpret_cast<PyObject*>(show_node()));
  module.def("call", &call);
  module.def("key", [](int64_t what, const std::vector<Tensor>& inputs, const std::vector<int64_t>& options) {
    return pybind11::bytes(key_of(what, inputs, options));
  });
  module.def("learn", &learn);
  module.def("forget", &forget);
  module.def("set_driver", &set_driver);
}
