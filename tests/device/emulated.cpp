// An emulated accelerator: torch's device `emulated:0` and `emulated:1`, in the memory of the processor.
//
// Tensors hold values, and every operation runs on the processor. As on a GPU, an operation that mixes tensors of
// different devices raises, the device has generators of its own, recurrent cells and dropout are fused operations,
// and each read of a number by the host is counted (`torch.ops.emulated.reads()`).

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <array>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>

namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 2;

// --- Reads of numbers by the host, for each of which a program waits for a GPU.

std::mutex lock;
c10::Dict<std::string, int64_t> counts;
thread_local int inside_fallback = 0; // copies that the emulation itself makes are not reads

void count(const std::string& name) {
  std::lock_guard<std::mutex> guard(lock);
  counts.insert_or_assign(name, counts.contains(name) ? counts.at(name) + 1 : 1);
}

c10::Dict<std::string, int64_t> reads() {
  std::lock_guard<std::mutex> guard(lock);
  return counts.copy();
}

void reset() {
  std::lock_guard<std::mutex> guard(lock);
  counts.clear();
}

// --- Devices, their memory and their generators.

thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(KIND, current); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < COUNT, "there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index())
      current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Memory final : at::Allocator {
  static void release(void* place) { c10::free_cpu(place); }
  at::DataPtr allocate(size_t size) override {
    void* place = size ? c10::alloc_cpu(size) : nullptr;
    return {place, place, &release, c10::Device(KIND, current)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory)

// A generator of the device. A processor's generator draws for it, and operations on the processor are given that one.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator drawing;
  DeviceGenerator(c10::DeviceIndex index, at::Generator drawing)
      : c10::GeneratorImpl(c10::Device(KIND, index), c10::DispatchKeySet(KEY)), drawing(std::move(drawing)) {}
  explicit DeviceGenerator(c10::DeviceIndex index) : DeviceGenerator(index, at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { drawing.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { drawing.set_offset(offset); }
  uint64_t get_offset() const override { return drawing.get_offset(); }
  uint64_t current_seed() const override { return drawing.current_seed(); }
  uint64_t seed() override { return drawing.seed(); }
  void set_state(const c10::TensorImpl& state) override { drawing.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return drawing.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return KIND; }

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device().index(), drawing.clone()); }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::array<at::Generator, COUNT> all = {
      at::make_generator<DeviceGenerator>(c10::DeviceIndex(0)), at::make_generator<DeviceGenerator>(c10::DeviceIndex(1))};
  return all.at(index < 0 ? current : index);
}

at::Generator drawing_for(const std::optional<at::Generator>& given, c10::DeviceIndex index) {
  const at::Generator& chosen = given.has_value() && given->defined() ? *given : default_generator(index);
  TORCH_CHECK(chosen.device().type() == KIND, "a generator of ", chosen.device(), " draws for the emulated device");
  return static_cast<DeviceGenerator*>(chosen.unsafeGetGeneratorImpl())->drawing;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return c10::Device(KIND, current); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice(c10::Device(KIND, index)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice(c10::Device(KIND, index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::DataPtr moved = memory.allocate(size);
    std::memcpy(moved.mutable_get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr(std::move(moved));
    storage.set_nbytes(size);
  }
};

// --- New tensors, copies and views.

c10::Device placed(std::optional<c10::Device> device) {
  return device.has_value() && device->has_index() ? *device : c10::Device(KIND, current);
}

Tensor empty(
    IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(placed(device));
  return at::detail::empty_strided_generic(
      sizes, strides, &memory, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype));
}

// The same numbers in the same memory, as a tensor of the processor.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.device().is_privateuseone())
    return tensor;
  at::AutoDispatchBelowADInplaceOrView below;
  auto* held = new Tensor(tensor);
  at::DataPtr place(
      const_cast<void*>(tensor.storage().data()), held, [](void* one) { delete static_cast<Tensor*>(one); }, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(place), nullptr, false);
  Tensor alias = at::empty({0}, tensor.options().device(at::kCPU));
  alias.set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
  if (tensor.is_conj())
    alias._set_conj(true);
  if (tensor.is_neg())
    alias._set_neg(true);
  return alias;
}

OptionalTensor on_host(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(on_host(*tensor)) : tensor;
}

Tensor on_device(const Tensor& tensor, c10::Device device) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!tensor.defined())
    return tensor;
  Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  on_host(made).copy_(tensor);
  return made;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (!inside_fallback && from.device().is_privateuseone() && to.device().is_cpu())
    count("copy");
  at::AutoDispatchBelowADInplaceOrView below;
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& tensor) {
  count("item");
  return on_host(tensor).item();
}

Tensor as_strided(const Tensor& one, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(one, sizes, strides, offset);
}

Tensor reshape_alias(const Tensor& one, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(one, sizes, strides, std::nullopt);
}

Tensor view(const Tensor& one, IntArrayRef sizes) { return at::native::view(one, sizes); }

Tensor unfold(const Tensor& one, int64_t axis, int64_t size, int64_t step) {
  return at::native::unfold(one, axis, size, step);
}

const Tensor& resize(const Tensor& one, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(one, sizes, format);
}

Tensor& set(Tensor& one, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  return at::cpu::set_(one, std::move(storage), offset, sizes, strides);
}

Tensor& set_whole(Tensor& one, at::Storage storage) {
  int64_t size = storage.nbytes() / one.dtype().itemsize();
  return at::cpu::set_(one, std::move(storage), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& one, const Tensor& other) {
  return at::cpu::set_(one, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

// --- Every other operation, on copies in the processor's memory.

const std::set<std::string> WAITING = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::unique_dim_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave"};

// Raise if tensors lie on different devices. As for a GPU, one number may lie on the processor; so may the index of a
// tensor of the device, but not the other way.
std::optional<c10::Device> common_device(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  bool on_processor = false;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined())
      return;
    if (!tensor.device().is_privateuseone()) {
      on_processor |= tensor.dim() > 0;
      return;
    }
    TORCH_CHECK(!device || *device == tensor.device(), name, ": tensors on ", *device, " and ", tensor.device());
    device = tensor.device();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor())
      look(argument.toTensor());
    else if (argument.isTensorList())
      for (const Tensor& tensor : argument.toTensorVector())
        look(tensor);
    else if (argument.isOptionalTensorList())
      for (const auto& index : argument.toOptionalTensorVector()) {
        bool is_index = index.has_value() && index->defined();
        bool elsewhere = is_index && !index->device().is_cpu() && (!device || *device != index->device());
        TORCH_CHECK(!elsewhere, name, ": indices on another device than the tensor");
        if (is_index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte))
          count("mask");
      }
  }
  TORCH_CHECK(!(device && on_processor), name, ": tensors on ", *device, " and cpu");
  return device;
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  size_t first = stack->size() - schema.arguments().size();
  auto device = common_device(schema.name(), c10::ArrayRef<c10::IValue>(*stack).slice(first));
  if (WAITING.count(schema.name()))
    count(schema.name().substr(6));
  for (size_t place = 0; place < schema.arguments().size(); place++)
    if (schema.arguments()[place].type()->str() == "Generator?") {
      auto given = (*stack)[first + place].toOptional<at::Generator>();
      (*stack)[first + place] = drawing_for(given, device ? device->index() : current);
    }
  c10::DeviceGuard guard(device ? *device : c10::Device(KIND, current));
  inside_fallback++;
  try {
    at::native::cpu_fallback(operation, stack, true);
  } catch (...) {
    inside_fallback--;
    throw;
  }
  inside_fallback--;
}

// --- Operations that torch asks a device for in a form of its own: convolutions, dropout, recurrent cells.

Tensor convolution(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  common_device("convolution", {x, weight, bias});
  auto found = at::convolution(
      on_host(x), on_host(weight), on_host(bias), stride, padding, dilation, transposed, output_padding, groups);
  return on_device(found, x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& x, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  common_device("convolution_backward", {gradient, x, weight});
  IntArrayRef bias_sizes = gradient.sizes().slice(1, 1);
  auto [for_x, for_weight, for_bias] = at::convolution_backward(
      on_host(gradient), on_host(x), on_host(weight), bias_sizes, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  return {on_device(for_x, x.device()), on_device(for_weight, x.device()), on_device(for_bias, x.device())};
}

std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> train) {
  Tensor mask = at::empty(x.sizes(), x.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0)
    return {x.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {p == 1 ? at::zeros_like(x) : x * mask * (1 / (1 - p)), mask};
}

Tensor plus(const Tensor& one, const OptionalTensor& bias) {
  return bias.has_value() && bias->defined() ? one + *bias : one;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& c, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto gates = (plus(from_input, input_bias) + plus(from_hidden, hidden_bias)).chunk(4, 1);
  Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  Tensor next = f * c + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const OptionalTensor& for_hidden, const OptionalTensor& for_cell, const Tensor& c, const Tensor& next,
    const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  const Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  Tensor dh = for_hidden.has_value() && for_hidden->defined() ? *for_hidden : at::zeros_like(next);
  Tensor t = next.tanh();
  Tensor dc = plus(dh * o * (1 - t * t), for_cell);
  Tensor all = at::cat({dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {all, dc * f, has_bias ? all.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& h, const OptionalTensor& input_bias,
    const OptionalTensor& hidden_bias) {
  auto x = plus(from_input, input_bias).chunk(3, 1), s = plus(from_hidden, hidden_bias).chunk(3, 1);
  Tensor r = (x[0] + s[0]).sigmoid(), z = (x[1] + s[1]).sigmoid(), n = (x[2] + r * s[2]).tanh();
  return {n + z * (h - n), at::cat({r, z, n, h, s[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& gradient, const Tensor& workspace, bool has_bias) {
  auto held = workspace.chunk(5, 1);
  const Tensor &r = held[0], &z = held[1], &n = held[2], &h = held[3], &s = held[4];
  Tensor dz = gradient * (h - n) * z * (1 - z), dn = gradient * (1 - z) * (1 - n * n), dr = dn * s * r * (1 - r);
  Tensor for_input = at::cat({dr, dz, dn}, 1), for_hidden = at::cat({dr, dz, dn * r}, 1);
  Tensor none;
  return {
      for_input, for_hidden, gradient * z, has_bias ? for_input.sum(0) : none, has_bias ? for_hidden.sum(0) : none};
}

TORCH_LIBRARY(emulated, library) {
  library.def("reads() -> Dict(str, int)", reads);
  library.def("reset() -> ()", reset);
  library.def("current() -> int", [] { return int64_t(current); });
  library.def("choose(int index) -> ()", [](int64_t index) { Guard().setDevice(c10::Device(KIND, index)); });
  library.def("state(int index) -> Tensor", [](int64_t index) { return default_generator(index).get_state(); });
  library.def("set_state(int index, Tensor state) -> ()", [](int64_t index, const Tensor& state) {
    at::Generator generator = default_generator(index);
    generator.set_state(state);
  });
  library.def("seed(int index, int seed) -> ()", [](int64_t index, int64_t seed) {
    at::Generator generator = default_generator(index);
    generator.set_current_seed(seed);
  });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("unfold", unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set);
  library.impl("set_.source_Storage", set_whole);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("native_dropout", dropout);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Autocast, with the lists of operations that torch has for every kind of device.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { // the name that torch's macros expect
#define SHORTER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(SHORTER)
#undef SHORTER
#define LONGER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(LONGER)
#undef LONGER
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST)
#undef WIDEST
}

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace
